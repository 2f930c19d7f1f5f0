"""The rank grid and the layer split, as plain arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple, Protocol

from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.errors import ConfigError


@dataclass(frozen=True)
class Coords:
    """One rank's coordinate on each axis of the grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ExpertCoords:
    """One rank's coordinate on each axis of the experts' grid: pipeline, data, expert, tensor."""

    pp: int
    edp: int
    ep: int
    etp: int


class Shard(NamedTuple):
    """Shard `rank` of the `size` equal ones of a parameter that is split."""

    rank: int
    size: int


class Copy(NamedTuple):
    """Copy `number` of the `copies` of a shard that ranks hold."""

    number: int
    copies: int


class Named(Protocol):
    """What of a row decides which axes split its parameter."""

    @property
    def megatron(self) -> str:
        """Name template of the parameter: with {expert} if every expert has its own."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes: tensor, context, expert, data, pipeline, and model chunks per stage.

    Ranks count pp-major, then dp, cp, and tp fastest: Megatron-Core's order "tp-cp-ep-dp-pp".
    Experts are on the same ranks in a grid of their own, with `etp` (as many as `tp` if None)
    fastest, then `ep`, then their data-parallel ranks `edp`, which are those left.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if size is not None and size < 1:
                raise ConfigError(
                    f"topology: {axis.name} is {size}; every axis must have 1 rank or more"
                )
        stage = self.tp * self.cp * self.dp
        if stage % (self.expert_tp * self.ep):
            legal = [n for n in range(1, stage + 1) if stage % (self.expert_tp * n) == 0]
            fix = f"ep can be one of {legal}" if legal else f"etp must divide {stage}"
            raise ConfigError(
                f"topology: etp {self.expert_tp} x ep {self.ep} does not divide the {stage} ranks "
                f"(tp x cp x dp) of a pipeline stage; {fix}"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Data-parallel ranks of experts: how many hold the same ones."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coords(self, rank: int) -> Coords:
        """Coordinates of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside 0..{self.world_size - 1}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(pp=pp, dp=dp, cp=cp, tp=tp)

    def rank(self, coords: Coords) -> int:
        """Global rank at the coordinates; inverse of `coords`."""
        for axis in fields(coords):
            at, size = getattr(coords, axis.name), getattr(self, axis.name)
            assert 0 <= at < size, f"{axis.name} coordinate {at} is outside 0..{size - 1}"
        return ((coords.pp * self.dp + coords.dp) * self.cp + coords.cp) * self.tp + coords.tp

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Coordinates of a global rank in the experts' grid."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside 0..{self.world_size - 1}"
        rest, etp = divmod(rank, self.expert_tp)
        rest, ep = divmod(rest, self.ep)
        pp, edp = divmod(rest, self.edp)
        return ExpertCoords(pp=pp, edp=edp, ep=ep, etp=etp)

    def experts_of(self, ep: int, number: int) -> range:
        """Which of a layer's `number` experts are held by the expert-parallel rank `ep`."""
        share, left = divmod(number, self.ep)
        assert not left, f"{number} experts over {self.ep} expert-parallel ranks"
        return range(ep * share, (ep + 1) * share)

    def expert_owner(self, expert: int, number: int) -> int:
        """The expert-parallel rank that holds an expert; the inverse of `experts_of`."""
        return expert * self.ep // number

    @property
    def experts_apart(self) -> bool:
        """Whether other ranks hold copies of an expert's parameters than of all others."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def gather_block(self) -> int:
        """How many consecutive ranks of a stage hold between them all that it has, so that no rank
        outside is needed to gather it: whole tensor-parallel groups and whole groups of experts.
        """
        return math.lcm(self.tp, self.ep * self.expert_tp)

    def block_of(self, rank: int) -> int:
        """The number of a global rank's `gather_block` in its stage."""
        return rank % (self.world_size // self.pp) // self.gather_block

    @cached_property
    def gatherers(self) -> tuple[int, ...]:
        """The ranks of a stage, numbered from its first, in blocks that share the work of gathering
        what the stage has. Blocks of further context-parallel ranks would only repeat it.
        """
        stage = range(self.world_size // self.pp)
        first = {self.block_of(rank) for rank in stage if self.coords(rank).cp == 0}
        return tuple(rank for rank in stage if self.block_of(rank) in first)

    @property
    def joins_replicas(self) -> bool:
        """Whether a rank of one data-parallel replica holds experts that another replica needs:
        then all replicas must run their forward passes together.
        """
        return (self.tp * self.cp) % (self.expert_tp * self.ep) != 0

    def reporters(self) -> tuple[int, ...]:
        """Ranks with pp = cp = tp = 0 in order of dp: the driver uses what these return."""
        return tuple(self.rank(Coords(pp=0, dp=dp, cp=0, tp=0)) for dp in range(self.dp))


@dataclass(frozen=True)
class LayerSplit:
    """Which global layers each (pipeline stage, model chunk) holds: `stages[pp][chunk]` is a range.

    Chunk 0 of every stage comes first, then chunk 1 of every stage, as Megatron-Core's interleaved
    schedule visits them.
    """

    stages: tuple[tuple[range, ...], ...]

    @classmethod
    def of(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        first: int | None = None,
        last: int | None = None,
    ) -> LayerSplit:
        """Megatron-Core's split of `num_layers`; `first` and `last` are the layer counts of the
        outer stages.

        ConfigError, naming the legal values, if there is no such split.
        """
        counts = _layers_per_stage(num_layers, pp, first, last)
        key = "virtual_pipeline_model_parallel_size"
        if vpp > 1 and pp == 1:
            raise ConfigError(
                f"{key}={vpp} needs pipeline_model_parallel_size of at least 2; use 1"
            )
        if vpp > 1 and pp == 2 and first is not None and last is not None:
            # Megatron-Core's offset divides by the number of stages between the two ends.
            raise ConfigError(f"{key}={vpp} with 2 stages takes {_FIRST} or {_LAST}, not both")
        common = math.gcd(*counts)
        if common % vpp:
            legal = [size for size in range(1, common + 1) if common % size == 0]
            raise ConfigError(
                f"{key}={vpp} does not divide the layers per stage {counts}; use one of {legal}"
            )
        return cls.of_chunks([count // vpp for count in counts] * vpp, pp)

    @classmethod
    def balance(cls, costs: Sequence[int], pp: int, vpp: int = 1) -> LayerSplit:
        """The split of layers of these costs whose dearest chunk is as cheap as possible. Later
        chunks are filled first: earlier stages keep activations of more microbatches. There are
        no fewer layers than chunks.
        """
        assert len(costs) >= pp * vpp, (len(costs), pp, vpp)

        def fill(most: int) -> list[int] | None:
            """How many layers each chunk has, at least one, where none costs more than `most`, and
            later ones take what they can; None if some are left.
            """
            counts, left = [], len(costs)
            for before in reversed(range(pp * vpp)):
                room, last = most, left
                while left > before and costs[left - 1] <= room:
                    left -= 1
                    room -= costs[left]
                counts.append(last - left)
            return None if left else counts[::-1]

        possible = range(max(costs), sum(costs) + 1)
        least = bisect_left(possible, True, key=lambda most: fill(most) is not None)
        counts = fill(possible[least])
        assert counts is not None
        return cls.of_chunks(counts, pp)

    @classmethod
    def of_chunks(cls, counts: Sequence[int], pp: int) -> LayerSplit:
        """Chunks have so many layers, in the order of the layers."""
        stages: list[list[range]] = [[] for _ in range(pp)]
        start = 0
        for number, count in enumerate(counts):
            stages[number % pp].append(range(start, start + count))
            start += count
        return cls(tuple(tuple(stage) for stage in stages))

    @property
    def chunks(self) -> tuple[range, ...]:
        """All chunks in the order of their layers."""
        return tuple(chunk for each in zip(*self.stages, strict=True) for chunk in each)

    def owner(self, layer: int) -> tuple[int, int]:
        """(pipeline stage, chunk) that holds a global layer."""
        for pp, chunks in enumerate(self.stages):
            for chunk, layers in enumerate(chunks):
                if layer in layers:
                    return pp, chunk
        raise AssertionError(f"layer {layer} is in no stage of {self.stages}")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short form: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


_FIRST = "num_layers_in_first_pipeline_stage"
_LAST = "num_layers_in_last_pipeline_stage"


def _layers_per_stage(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    if first is None and last is None:
        if num_layers % pp:
            legal = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
            raise ConfigError(
                f"{num_layers} layers do not split evenly over pipeline_model_parallel_size={pp}; "
                f"use one of {legal}, or set {_FIRST} or {_LAST}"
            )
        return [num_layers // pp] * pp
    if pp == 1:
        raise ConfigError(f"{_FIRST} and {_LAST} need pipeline_model_parallel_size of at least 2")
    ends = [first] if first is not None else []
    tail = [last] if last is not None else []
    middle = pp - len(ends) - len(tail)
    left = num_layers - sum(ends) - sum(tail)
    if min(ends + tail) < 1 or (left != 0 if middle == 0 else left < middle or left % middle):
        raise ConfigError(_uneven_split_message(num_layers, pp, first, last))
    return ends + ([left // middle] * middle if middle else []) + tail


def _uneven_split_message(num_layers: int, pp: int, first: int | None, last: int | None) -> str:
    """Name the legal values of one end while the other is unchanged."""
    if first is not None:
        name, fixed, middle = _FIRST, last or 0, pp - 1 - (last is not None)
    else:
        name, fixed, middle = _LAST, 0, pp - 1
    free = num_layers - fixed
    legal = [
        n
        for n in range(1, free + 1)
        if (n == free if middle == 0 else free - n >= middle and (free - n) % middle == 0)
    ]
    asked = ", ".join(f"{k}={v}" for k, v in ((_FIRST, first), (_LAST, last)) if v is not None)
    fix = f"{name} can be one of {legal}" if legal else f"no value of {name} fits; lower {_LAST}"
    return (
        f"{num_layers} layers do not split over pipeline_model_parallel_size={pp} with {asked}: "
        f"the {middle} other stages need the same number of layers each, at least 1; {fix}"
    )


@dataclass(frozen=True)
class Placement:
    """One rank's place in the grid, and the parts of the model it holds."""

    topology: Topology
    coords: Coords
    split: LayerSplit

    def shard_of(self, row: Named) -> Shard:
        """Which shard of the row's parameter this rank holds, whatever axis splits it. Which
        elements are in it follows from the row's blocks; a replicated parameter is the same in all.
        """
        if of_expert(row.megatron):
            return Shard(self._expert_coords.etp, self.topology.expert_tp)
        return Shard(self.coords.tp, self.topology.tp)

    def copy_of(self, row: Named) -> Copy:
        """Which copy of its shard of the row's parameter this rank holds."""
        if of_expert(row.megatron):
            return Copy(self._expert_coords.edp, self.topology.edp)
        at, size = self.coords, self.topology
        return Copy(at.dp * size.cp + at.cp, size.dp * size.cp)

    @cached_property
    def _expert_coords(self) -> ExpertCoords:
        return self.topology.expert_coords(self.topology.rank(self.coords))

    def experts(self, number: int) -> range:
        """Which of a layer's `number` experts this rank holds, or a share of."""
        return self.topology.experts_of(self._expert_coords.ep, number)

    def layers(self, chunk: int) -> range:
        """Global numbers of the layers in this rank's model chunk `chunk`."""
        return self.split.stages[self.coords.pp][chunk]

    def holds_embedding(self, chunk: int) -> bool:
        """Whether this chunk is the first of the pipeline."""
        return self.coords.pp == 0 and chunk == 0

    def holds_head(self, chunk: int) -> bool:
        """Whether this chunk is the last of the pipeline."""
        return self.coords.pp == self.topology.pp - 1 and chunk == self.topology.vpp - 1
