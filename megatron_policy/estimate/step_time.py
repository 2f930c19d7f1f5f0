"""What a training step must at least take: operations, bytes on the wire, and the schedule.

Bounds, not predictions: devices and links run at the rates of their data sheets. Traffic is what
Megatron-Core's collectives send, counted for the busiest rank. Sources: Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (tensor and sequence parallelism);
Rajbhandari et al. 2020, "ZeRO" (the distributed optimizer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split
from megatron_policy.converters.architecture import Architecture, Layer, Moe, Recurrence
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.devices import DeviceFigures
from megatron_policy.estimate.flops import BACKWARD, forward_flops, model_flops
from megatron_policy.estimate.memory import BatchShape, kernels_of
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.states import WIDTHS, ModelRows, Precisions, States
from megatron_policy.parallel.topology import Topology

HEAD_AGAIN = 1
"""The head's logits are computed again for the gradient, tile by tile."""

AXES = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class StepTime:
    """Least seconds of a training step, and what they consist of."""

    model_flops: int
    """Of the whole step on all ranks, without recomputation."""
    compute: float
    """Matrix products with the schedule's waiting, recomputation included."""
    optimizer: float
    """Reading and writing the optimizer's states once."""
    wire: dict[str, float]
    """For each axis, moving its bytes over the slowest link that its group spans."""
    wire_bytes: dict[str, int]
    """Sent by the busiest rank."""
    bubble: float
    """The share of the step in which a stage waits, if all are equally slow."""
    balance: float
    """The mean stage's time over that of the slowest."""

    @property
    def overlapped(self) -> float:
        """The lower bound: all that can overlap does."""
        return max(self.compute, *self.wire.values()) + self.optimizer

    @property
    def serial(self) -> float:
        """If nothing overlaps."""
        return self.compute + sum(self.wire.values()) + self.optimizer

    def mfu(self, ranks: int, device: DeviceFigures) -> float:
        """Model FLOPs utilisation at `serial`."""
        return self.model_flops / (self.serial * ranks * device.bf16_flops)


def step_time(
    config: PolicyConfig,
    rows: ModelRows,
    topology: Topology,
    batch_shape: BatchShape,
    states: States,
    device: DeviceFigures,
) -> StepTime:
    """Bounds of a step under the configuration; `states` are those of the fullest stage."""
    arch, adapters = rows.architecture, ModelAdapters.of(rows, config.megatron_cfg.peft)
    microbatches = batch_shape.microbatches(topology)
    schedule = Schedule.of(topology, microbatches)
    passes = pass_seconds(config, arch, adapters, topology, batch_shape, device)
    stages = [sum(map(sum, chunks)) for chunks in passes]
    wire_bytes = _traffic(config, arch, topology, batch_shape, states)
    spans = {
        "tp": topology.tp,
        "cp": topology.tp * topology.cp,
        "ep": topology.expert_tp * topology.ep,
        "pp": topology.world_size,
        "dp": topology.world_size // topology.pp,
    }
    lengths, tower = [batch_shape.length] * batch_shape.rows, batch_shape.tower
    pictures = batch_shape.rows * (tower.flops + BACKWARD * tower.trained_flops)
    touched = 2 * (states.main_parameters + states.moments) + states.gradients
    touched += states.parameters - states.frozen
    return StepTime(
        model_flops=model_flops(arch, lengths, adapters=adapters) + pictures,
        compute=schedule.seconds(stages),
        optimizer=touched / device.memory_bandwidth,
        wire={axis: sent / device.link(spans[axis]) for axis, sent in wire_bytes.items()},
        wire_bytes=wire_bytes,
        bubble=schedule.bubble,
        balance=sum(stages) / len(stages) / max(stages),
    )


def pass_seconds(
    config: PolicyConfig,
    arch: Architecture,
    adapters: ModelAdapters | None,
    topology: Topology,
    batch_shape: BatchShape,
    device: DeviceFigures,
) -> list[list[tuple[float, float]]]:
    """Of each stage and chunk, a forward pass over one microbatch, and a backward pass, which
    computes activations again that are not kept.
    """
    sequences, tower = batch_shape.rows_together, batch_shape.tower
    lengths = [batch_shape.length] * sequences
    flops = forward_flops(arch, lengths, adapters=adapters)
    rate = device.bf16_flops * topology.tp * topology.cp
    settings = config.megatron_cfg
    number = settings.recompute_num_layers or 1
    passes: list[list[tuple[int, int]]] = []
    for chunks in layer_split(config, arch, topology).stages:
        passes.append([])
        for layers in chunks:
            forward = backward = 0
            for at, layer in enumerate(layers):
                again = 0
                if settings.recompute_granularity == "full":
                    again = int(settings.recompute_method != "block" or at < number)
                of = flops.layers[layer]
                forward += of.total
                backward += again * of.total + of.backward
                mixers = arch.layers[layer].mixers
                recurrent = (mixer for mixer in mixers if isinstance(mixer, Recurrence))
                scans = sum(mixer.count_core_flops(lengths) for mixer in recurrent)
                backward += scans  # they are their own unit of recomputation
                if settings.recompute_granularity == "selective":
                    modules = settings.recompute_modules or ()
                    backward += (of.attention - scans) * ("core_attn" in modules)
                    feed = arch.layers[layer].feed
                    again = feed is not None and feed.computed_again
                    backward += of.mlp * ("mlp" in modules and again)
            passes[-1].append((forward, backward))
    forward, backward = passes[-1][-1]
    forward += flops.head + flops.mtp
    backward += HEAD_AGAIN * flops.head + flops.head_backward + (BACKWARD + HEAD_AGAIN) * flops.mtp
    passes[-1][-1] = forward, backward
    # Every rank of the first stage computes all features.
    whole = sequences * topology.tp * topology.cp
    forward, backward = passes[0][0]
    ahead, back = whole * tower.flops, BACKWARD * whole * tower.trained_flops
    passes[0][0] = forward + ahead, backward + back
    return [[(ahead / rate, back / rate) for ahead, back in stage] for stage in passes]


def _traffic(
    config: PolicyConfig,
    arch: Architecture,
    topology: Topology,
    batch_shape: BatchShape,
    states: States,
) -> dict[str, int]:
    """Bytes that the busiest rank sends in a step, by axis."""
    at, settings, precisions = topology, config.megatron_cfg, Precisions.of(config)
    batch, microbatches = batch_shape.microbatch(at), batch_shape.microbatches(at)
    stages = layer_split(config, arch, at).stages

    def find_most(count: Callable[[Layer], int]) -> int:
        """The sum over the layers of a stage, of the one for which it is largest."""
        of = {number: count(layer) for number, layer in kinds.items()}
        return max(sum(of[id(arch.layers[n])] for held in each for n in held) for each in stages)

    kinds = {id(layer): layer for layer in arch.layers}
    token = batch.tokens * WIDTHS[config.precision]
    hidden, split = token * arch.hidden_size, at.tp if settings.sequence_parallel else 1
    passes = 2 + int(settings.recompute_granularity == "full")
    # Each linear pair gathers and reduces in each pass; experts' ranks have traffic of their own.
    # With sequence parallelism the backward pass gathers the input again, unless weights are
    # frozen, which have no gradients.
    pairs = find_most(lambda layer: sum(not isinstance(part, Moe) for part in layer.parts))
    collectives = 2 * pairs * passes
    if settings.sequence_parallel and not settings.peft.enabled:
        collectives += pairs
    # Keys and values visit all ranks, or tokens those that have their heads; gradients come back.
    # Transformer Engine also sends keys and values again to find these.
    attending = passes + kernels_of(config, arch, accelerated=True).transformer_engine
    attending += "core_attn" in (settings.recompute_modules or ())
    exchanged = find_most(partial(_count_exchanged, at, passes, attending))
    # A pass sends each token to its experts and back; the ranks that split an expert gather what
    # each got.
    spread = _share(at.ep) + (at.expert_tp - 1)
    routed = int(2 * token / split * find_most(partial(_count_routed, arch.hidden_size)) * spread)
    # Gradients are reduced, and parameters or gradients gathered: those of experts over the ranks
    # that hold copies of them, all others over all replicas.
    gathered = precisions.parameter if precisions.distributed else precisions.gradient
    dense = (states.gradients - states.expert_gradients) * _share(at.dp * at.cp)
    reduced = dense + states.expert_gradients * _share(at.edp)
    return {
        "tp": microbatches * int(collectives * hidden * _share(at.tp)),
        "cp": microbatches * (at.cp - 1) * token * exchanged,
        "ep": microbatches * passes * routed,
        # Each chunk sends its output on, and a gradient back.
        "pp": microbatches * (2 * at.vpp * hidden // split) * (at.pp > 1),
        "dp": int((1 + gathered / precisions.gradient) * reduced),
    }


def _count_exchanged(at: Topology, passes: int, attending: int, layer: Layer) -> int:
    """Channels of a token that context-parallel ranks exchange in so many passes through the layer,
    and through its attention.
    """
    return sum(
        mixer.count_exchanged(at.tp, at.cp)
        * (passes if isinstance(mixer, Recurrence) else attending)
        for mixer in layer.mixers
    )


def _count_routed(hidden_size: int, layer: Layer) -> int:
    """Channels of a token that go to its experts."""
    if not isinstance(layer.feed, Moe):
        return 0
    return layer.feed.chosen * (layer.feed.latent_size or hidden_size)


def _share(size: int) -> float:
    """What a rank sends of what a collective of `size` ranks gathers or reduces."""
    return (size - 1) / size
