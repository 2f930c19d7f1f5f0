"""Bytes on each rank of a training step, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_policy.config import MegatronConfig, PolicyConfig
from megatron_policy.config.batching import batching_of
from megatron_policy.config.layout import layer_split, microbatch_round
from megatron_policy.converters.architecture import Activation, Architecture, Mla, padded_vocab
from megatron_policy.converters.architecture.beyond import beyond_transformer_engine
from megatron_policy.converters.architecture.part import FP32, Kernels
from megatron_policy.estimate.activations import LayerActivations, MicrobatchShape
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.states import (
    WIDTHS,
    ModelRows,
    Precisions,
    States,
    stage_states,
)
from megatron_policy.estimate.tower import NO_TOWERS, TowerCost
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused_tiles import SEARCHED_GPU
from megatron_policy.parallel.topology import Topology

STRIP_ELEMENTS = 2**28
"""Logits on which a GPU does elementwise work at once, in fp32."""

_SEARCHED_STRIPS = 4
"""Matrices of a strip's logits, fp32, that exist while the bounds of what is kept are searched."""


def longest_row(config: PolicyConfig, architecture: Architecture) -> int:
    """The most tokens that a row can have: of the configuration and of the model's positions."""
    return min(config.max_total_sequence_length, architecture.positions)


@dataclass(frozen=True)
class BatchShape:
    """A step over `rows` rows of `length` tokens each, in microbatches of `tokens`."""

    rows: int
    length: int
    tokens: int
    packed: bool
    tower: TowerCost = NO_TOWERS
    """Of each row's pictures and sound."""

    @classmethod
    def of(cls, config: PolicyConfig, length: int, tower: TowerCost = NO_TOWERS) -> BatchShape:
        """Of a global batch whose rows all have `length` tokens."""
        batching = batching_of(config, training=True)
        if batching.kind == "padded":
            together = config.train_micro_batch_size
        else:
            together = batching.tokens // length
            if tower.patches and batching.patches is not None:
                together = min(together, batching.patches // tower.patches)
        packed = config.sequence_packing.enabled
        tokens = max(1, together) * length
        return cls(config.train_global_batch_size, length, tokens, packed, tower)

    def microbatches(self, topology: Topology) -> int:
        """How many each data-parallel replica runs."""
        number = math.ceil(self.rows * self.length / (topology.dp * self.tokens))
        unit = microbatch_round(topology)
        return math.ceil(number / unit) * unit

    def microbatch(self, topology: Topology) -> MicrobatchShape:
        """What a rank computes at once."""
        tokens = -(-self.tokens // topology.cp)
        positions = tokens if self.packed else -(-self.length // topology.cp)
        pictures = self.tower.kept * self.rows_together
        return MicrobatchShape(tokens, self.length, positions, self.packed, pictures)

    @property
    def rows_together(self) -> int:
        """Rows of a microbatch."""
        return max(1, self.tokens // self.length)


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage, at the step's peak."""

    states: States
    activations: int
    """Of all microbatches in flight, with what is being computed again."""
    head: int
    """Logits and the gradient of the head, tile by tile."""

    @property
    def peak(self) -> int:
        """The most at the same time: in the backward pass, or in the optimizer's step."""
        return self.states.resident + max(self.activations + self.head, self.states.step)


def kernels_of(config: PolicyConfig, arch: Architecture, accelerated: bool) -> Kernels:
    """The modules that a GPU with Transformer Engine runs, or those of a CPU."""
    megatron = config.megatron_cfg
    with_te = accelerated and megatron.transformer_impl != "local"
    with_te = with_te and not beyond_transformer_engine(arch, megatron.peft.enabled)
    swiglu = arch.feed.gated and arch.feed.activation is Activation.SILU
    return Kernels(
        transformer_engine=with_te,
        fused_activation=accelerated and megatron.bias_activation_fusion and swiglu,
        fused_rope=with_te and megatron.apply_rope_fusion and arch.find_part(Mla) is None,
        fused_norm=accelerated,
        fused_dropout=accelerated,
        one_call=accelerated,
    )


def stage_memory(
    config: PolicyConfig,
    rows: ModelRows,
    topology: Topology,
    batch_shape: BatchShape,
    stage: int,
    kernels: Kernels,
    trained: bool = True,
) -> StageMemory:
    """What each rank of pipeline stage `stage` needs under the configuration."""
    arch = rows.architecture
    split = layer_split(config, arch, topology)
    states = stage_states(rows, split, topology, stage, Precisions.of(config, trained))
    if not trained:
        return StageMemory(states, 0, 0)
    last = stage == topology.pp - 1
    return StageMemory(
        states,
        # Ranks of a context-parallel group differ in their rectangles of attention.
        max(
            activation_bytes(config, rows, topology, batch_shape, stage, kernels, rank)
            for rank in ((0,) if kernels.transformer_engine else range(topology.cp))
        ),
        _head(config, arch, topology, batch_shape) if last else 0,
    )


def activation_bytes(
    config: PolicyConfig,
    rows: ModelRows,
    topology: Topology,
    batch_shape: BatchShape,
    stage: int,
    kernels: Kernels,
    cp_rank: int = 0,
) -> int:
    """What a rank of the stage, number `cp_rank` of its context-parallel group, keeps for backward
    passes when it keeps most.
    """
    arch, megatron = rows.architecture, config.megatron_cfg
    model = LayerActivations(
        arch,
        topology,
        WIDTHS[config.precision],
        megatron.sequence_parallel,
        kernels,
        cp_rank,
        ModelAdapters.of(rows, megatron.peft),
    )
    batch = batch_shape.microbatch(topology)
    chunks = [
        chunk_activations(
            layers,
            model,
            megatron,
            batch,
            first=stage == 0 and number == 0,
            last=stage == topology.pp - 1 and number == topology.vpp - 1,
        )
        for number, layers in enumerate(layer_split(config, arch, topology).stages[stage])
    ]
    schedule = Schedule.of(topology, batch_shape.microbatches(topology))
    own = schedule.most(stage, [c.kept for c in chunks], [c.most for c in chunks])
    return own + sum(chunk.shared for chunk in chunks)


def _head(
    config: PolicyConfig, arch: Architecture, topology: Topology, batch_shape: BatchShape
) -> int:
    """A tile of logits in the weights' dtype, a strip of it in fp32, the gradients of the tokens'
    hidden states in fp32 and of the weights, unless they are frozen. With filters several smaller
    strips, and where there are several tiles, the weights' gradient as a sum in fp32 and a term of
    it. A scalar head has hidden states in fp32 and their gradients.
    """
    if arch.head is not None:
        return 2 * FP32 * batch_shape.microbatch(topology).tokens * arch.hidden_size
    width = WIDTHS[config.precision]
    shard = padded_vocab(arch.vocab_size, topology.tp) // topology.tp
    tokens = batch_shape.microbatch(topology).tokens
    tile = min(config.logprob_chunk_size, tokens) * shard
    hidden = tokens * arch.hidden_size * (width + FP32)
    weights = 0 if config.megatron_cfg.peft.enabled else shard * arch.hidden_size
    if Filters.of_logprobs(config.generation) is None:
        return tile * width + min(tile, STRIP_ELEMENTS) * FP32 + hidden + weights * width
    strips = _SEARCHED_STRIPS * min(tile, SEARCHED_GPU) * FP32
    sums = weights * (FP32 + (width if width < FP32 else 0)) if tile < tokens * shard else 0
    return tile * width + strips + hidden + weights * width + sums


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes of one microbatch."""

    kept: int
    """Between its two passes, of this microbatch alone."""
    most: int
    """The most while its backward pass runs, at least `kept`: what is computed again is held beside
    what layers before it keep, while layers behind it have finished.
    """
    shared: int
    """What all microbatches share."""


def chunk_activations(
    layers: range,
    model: LayerActivations,
    settings: MegatronConfig,
    batch: MicrobatchShape,
    first: bool,
    last: bool,
) -> ChunkActivations:
    """Of a chunk of these layers; `first` has the embedding, `last` the head."""
    kept = model.embedding(batch) + batch.pictures + model.splice(batch) if first else 0
    # Those that are not packed have the same angles.
    angles = model.angles(batch) if settings.recompute_granularity == "full" else 0
    kept, shared = (kept + angles, 0) if batch.packed else (kept, angles)
    most = kept
    # A frozen embedding's output needs gradients only where `Pipeline` in
    # `engines/megatron/pipeline.py` has it need them.
    needed = not first or model.adapters is None or model.adapters.towers
    needed = needed or model.topology.pp > 1
    needed = needed or settings.recompute_granularity is not None
    units = [*_units(layers, model, settings, batch, needed)]
    if last:
        head = model.head(batch)
        units.append((head, head))
        # Layers for further tokens start from what the head takes, and finish before it.
        units += ((own + head, again) for own, again in _further(model, settings, batch))
    for own, again in units:
        most = max(most, kept + again)
        kept += own
    return ChunkActivations(kept, max(most, kept), shared)


def _units(
    layers: range,
    model: LayerActivations,
    settings: MegatronConfig,
    batch: MicrobatchShape,
    needed: bool,
) -> Iterator[tuple[int, int]]:
    """What each layer, or each group that is computed again at once, keeps between the passes, and
    the most during its own backward pass. `needed` says whether what enters needs gradients.
    """
    saved, alike = [], {}
    for layer in layers:
        key = model.kind(layer), needed
        if key not in alike:
            alike[key] = model.saved(layer, batch, needed)
        saved.append(alike[key])
        needed = needed or model.adapts(layer)
    number, hidden = settings.recompute_num_layers or 1, model.hidden(batch)
    if settings.recompute_granularity != "full":
        selective = settings.recompute_granularity == "selective"
        modules = settings.recompute_modules or () if selective else ()
        yield from ((each.kept(modules), each.again(modules)) for each in saved)
    elif settings.recompute_method == "block":
        for at, each in enumerate(saved):
            again = hidden + each.again(()) if at < number else each.again(())
            yield hidden if at < number else each.total, again
    else:
        for start in range(0, len(saved), number):
            # They are computed again at once, and left from the last one on.
            group = saved[start : start + number]
            before = accumulate((each.total for each in group), initial=0)
            most = max(kept + each.again(()) for kept, each in zip(before, group, strict=False))
            yield hidden, hidden + most


def _further(
    model: LayerActivations, settings: MegatronConfig, batch: MicrobatchShape
) -> Iterator[tuple[int, int]]:
    """The same of layers for multi-token prediction, one for each further token."""
    full = settings.recompute_granularity == "full"
    modules = settings.recompute_modules or ()
    selective = settings.recompute_granularity == "selective"
    for number in range(settings.mtp_num_layers):
        layer = model.arch.num_layers + min(number, model.arch.mtp_layers - 1)
        own, again = model.further(batch, layer, full)
        if selective:
            saved = model.saved(layer, batch)
            own += saved.kept(modules) - saved.total
            again += saved.again(modules) - saved.total
        yield own + model.embedding(batch), again + model.embedding(batch)
