"""A plan: what a configuration needs on each rank and how fast a step can be, and the search for
configurations that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import checked_topology, layer_split
from megatron_policy.config.megatron_sections import RECOMPUTE_KEYS, recompute_keys
from megatron_policy.config.parallel_sizes import (
    MEGATRON_SIZES,
    Engine,
    engine_of,
    keys_of_sizes,
    parallel_sizes,
)
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.formats.hf_files import is_peft
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.devices import NODE, DeviceFigures
from megatron_policy.estimate.memory import (
    BatchShape,
    StageMemory,
    kernels_of,
    longest_row,
    stage_memory,
)
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.states import WIDTHS, ModelRows, Precisions, written_bytes
from megatron_policy.estimate.step_time import StepTime, step_time
from megatron_policy.estimate.tower import NO_MEDIA, RowMedia, check_media, count_tower
from megatron_policy.parallel.topology import LayerSplit, Topology

RESERVED = 0.1
"""The share of a device's memory left to CUDA's context, NCCL's buffers and fragmentation."""

LEAST_TOKENS = 4096
"""Context parallelism leaves each rank at least so many tokens of a sequence."""

EQUAL = 1.05
"""Bounds that differ by no more than this factor say nothing about which plan is faster."""


@dataclass(frozen=True)
class StepPlan:
    """What a training step under `config` needs on `topology.world_size` devices."""

    config: PolicyConfig
    rows: ModelRows
    topology: Topology
    batch_shape: BatchShape
    device: DeviceFigures

    @property
    def architecture(self) -> Architecture:
        return self.rows.architecture

    @cached_property
    def split(self) -> LayerSplit:
        """The layers of each stage."""
        return layer_split(self.config, self.architecture, self.topology)

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule."""
        return Schedule.of(self.topology, self.batch_shape.microbatches(self.topology))

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of each rank, stage by stage."""
        kernels = kernels_of(self.config, self.architecture, accelerated=True)
        return tuple(
            stage_memory(self.config, self.rows, self.topology, self.batch_shape, stage, kernels)
            for stage in range(self.topology.pp)
        )

    @property
    def fullest(self) -> int:
        """The number of the stage that needs most memory."""
        return max(range(self.topology.pp), key=lambda stage: self.stages[stage].peak)

    @property
    def peak(self) -> int:
        """The most bytes that a rank needs."""
        return self.stages[self.fullest].peak

    @property
    def usable(self) -> int:
        """The bytes of a device that can be planned with."""
        return int(self.device.memory_bytes * (1 - RESERVED)) - self.device.engine_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage does."""
        return self.peak <= self.usable

    @cached_property
    def time(self) -> StepTime:
        """Bounds of a step."""
        fullest = max((stage.states for stage in self.stages), key=lambda each: each.parameters)
        return step_time(
            self.config, self.rows, self.topology, self.batch_shape, fullest, self.device
        )

    @property
    def reference_bytes(self) -> int:
        """Host memory for the weights of a frozen reference policy, on the fullest rank: none with
        adapters whose base is the reference, and as much as they take if it has others.
        """
        name, peft = self.config.reference_model_name, self.config.megatron_cfg.peft
        if peft.enabled and name is None:
            return 0
        widths, states = Precisions.of(self.config), [stage.states for stage in self.stages]
        of_adapters = [each.gradients * widths.parameter // widths.gradient for each in states]
        if name is not None and is_peft(name):
            return max(of_adapters)
        pairs = zip(states, of_adapters, strict=True)
        return max(each.parameters - (own if peft.enabled else 0) for each, own in pairs)

    @cached_property
    def refit_bytes(self) -> int:
        """A refit's buffers on each rank, beside its states: a bucket that is exchanged, one of the
        transport, and the largest tensor. Optimizer and gradients can leave the device meanwhile.
        """
        width = WIDTHS[self.config.refit_dtype or self.config.precision]
        total, largest = (elements * width for elements in self.rows.hf_elements())
        bucket = min(self.config.refit_bucket_bytes, total)
        at = self.topology
        exchanged = bucket if at.tp > 1 or at.pp > 1 or at.experts_apart else 0
        return exchanged + bucket + largest

    @property
    def snapshot_bytes(self) -> int:
        """Host memory of what a rank sends in a detached refit, at most: what it shares with others
        is counted whole.
        """
        width = Precisions.of(self.config).parameter
        sent = min(width, WIDTHS[self.config.refit_dtype or self.config.precision])
        return max(stage.states.parameters for stage in self.stages) * sent // width

    @property
    def staging_bytes(self) -> int:
        """Host memory of a checkpoint that is saved in the background, on the fullest rank."""
        megatron = self.config.megatron_cfg
        distributed = megatron.optimizer.use_distributed_optimizer
        return max(
            written_bytes(stage.states, self.topology, distributed, megatron.peft.enabled)
            for stage in self.stages
        )


def plan_of(
    config: PolicyConfig,
    rows: ModelRows,
    world_size: int,
    device: DeviceFigures,
    length: int | None = None,
    media: RowMedia = NO_MEDIA,
) -> StepPlan:
    """The plan of one configuration, each of whose rows has these media beside text; ConfigError
    if it fits neither the model nor the ranks.
    """
    if engine_of(config) is not Engine.MEGATRON_CORE:
        raise ConfigError(
            f"plans are of Megatron-Core, but {parallel_sizes(config).section} is enabled: set "
            "megatron_cfg.enabled to true and the other to false"
        )
    arch = rows.architecture
    topology = checked_topology(config, arch, world_size)
    if length is None:
        length = longest_row(config, arch)
    _check_positions(arch, length)
    check_media(arch, media, length)
    shape = BatchShape.of(config, length, count_tower(config, rows, media))
    return StepPlan(config, rows, topology, shape, device)


def _check_positions(arch: Architecture, length: int) -> None:
    """ConfigError if rows of `length` tokens need more positions than the model has."""
    positions = arch.positions
    if length > positions:
        raise ConfigError(
            f"rows of {length} tokens are longer than the model's {positions} positions: use "
            "shorter ones, or raise max_position_embeddings in its config.json if it was trained "
            "for more"
        )


SEARCHED = (
    *MEGATRON_SIZES.values(),
    "activation_checkpointing",
    *RECOMPUTE_KEYS,
)
"""The keys of `megatron_cfg` that a search sets or leaves at their defaults."""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to: legal plans, the fastest first, by whether they fit."""

    fitting: tuple[StepPlan, ...]
    too_large: tuple[StepPlan, ...]
    """Those that do not fit, the smallest first."""

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """All of them, the best first."""
        return self.fitting + self.too_large


def search(
    base: Mapping[str, Any],
    rows: ModelRows,
    world_size: int,
    device: DeviceFigures,
    length: int | None = None,
    media: RowMedia = NO_MEDIA,
) -> SearchResult:
    """Try every legal layout and recomputation with the keys of `base`, a `policy` section, which
    take the place of its own. Rows as `plan_of` has them.

    Ordered by the time of a step in which nothing overlaps. Of those as fast as the fastest within
    `EQUAL`, the simplest come first: with fewer pipeline stages and chunks, then with less memory.
    """
    longest = length or int(base.get("max_total_sequence_length", LEAST_TOKENS))
    if length is not None:
        _check_positions(rows.architecture, length)
    check_media(rows.architecture, media, longest)
    plans = []
    written = base.get("megatron_cfg") or {}
    kept = {key: value for key, value in written.items() if key not in SEARCHED}
    for keys in _layouts(rows.architecture, world_size, longest):
        megatron = {**kept, **keys}
        try:
            config = PolicyConfig.parse({**base, "megatron_cfg": megatron})
            plan = plan_of(config, rows, world_size, device, length, media)
        except ConfigError:
            continue
        plans.append(plan)
    fitting = [plan for plan in plans if plan.fits]
    fastest = min((plan.time.serial for plan in fitting), default=0.0)

    def rank(plan: StepPlan) -> tuple[float, ...]:
        at = plan.topology
        if plan.time.serial <= fastest * EQUAL:
            return 0, at.pp * at.vpp, at.cp, plan.peak
        return 1, plan.time.serial, plan.peak

    return SearchResult(
        tuple(sorted(fitting, key=rank)),
        tuple(sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.peak)),
    )


def _layouts(arch: Architecture, ranks: int, length: int) -> Iterator[dict[str, Any]]:
    """Keys of `megatron_cfg` for each layout to try; most are legal."""
    for tp in _powers(NODE):
        for cp in _powers(max(1, length // LEAST_TOKENS)):
            for pp in _divisors(ranks // (tp * cp)) if ranks % (tp * cp) == 0 else ():
                if pp > arch.num_layers:
                    continue
                per_stage = ranks // pp
                widths = [1] if arch.moe is None else _divisors(arch.moe.experts)
                for split in _splits(arch, pp):
                    for ep in [ep for ep in widths if per_stage % ep == 0]:
                        for recompute in _RECOMPUTATIONS:
                            sizes = {"tp": tp, "sequence_parallel": tp > 1, "cp": cp, "pp": pp}
                            experts = {"ep": ep, "etp": 1} if arch.moe else {}
                            yield keys_of_sizes(sizes | experts | split) | recompute


_RECOMPUTATIONS = [recompute_keys(what) for what in ("none", "layernorm+mlp", "full")]


def _splits(arch: Architecture, pp: int) -> Iterator[dict[str, int]]:
    """Even or balanced stages, also interleaved; else as even as a smaller last stage allows."""
    layers = arch.num_layers
    each, left = divmod(layers, pp)
    if arch.has_single_parts:
        yield from ({"vpp": chunks} for chunks in ((1, 2, 4) if pp > 1 else (1,)) if chunks <= each)
        return
    if left:
        last = layers - (each + 1) * (pp - 1)
        if last >= 1:
            yield {"last_layers": last}
        return
    for chunks in (1, 2, 4) if pp > 1 else (1,):
        if each % chunks == 0:
            yield {"vpp": chunks}


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


MOST_DEVICES = 2**14


def fewest_devices(fits: Callable[[int], bool], beyond: int) -> int | None:
    """The fewest devices that are enough, of powers of 2 and three times these, and more than
    `beyond`; None if there are none up to `MOST_DEVICES`.
    """
    powers = [2**n for n in range(MOST_DEVICES.bit_length())]
    sizes = sorted({*powers, *(3 * size // 2 for size in powers[1:])})
    return next((size for size in sizes if size > beyond and fits(size)), None)
