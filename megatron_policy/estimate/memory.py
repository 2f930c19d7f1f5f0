"""Bytes on each rank of a training step, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_policy.config import PolicyConfig
from megatron_policy.config.batching import batching_of
from megatron_policy.config.layout import layer_split, microbatch_round
from megatron_policy.converters.architecture import Activation, Architecture, Mla, padded_vocab
from megatron_policy.converters.architecture.beyond import beyond_transformer_engine
from megatron_policy.converters.architecture.part import FP32, Kernels
from megatron_policy.estimate.activations import LayerActivations, MicrobatchShape
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.recomputation import chunk_activations
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
