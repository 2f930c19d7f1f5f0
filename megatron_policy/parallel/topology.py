"""The rank grid and the layer split, as plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_policy.errors import ConfigError


@dataclass(frozen=True)
class Coords:
    """One rank's coordinate on each axis of the grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes: tensor, context, expert, data, pipeline, and model chunks per stage.

    Ranks count pp-major, then dp, cp, and tp fastest: Megatron-Core's order "tp-cp-ep-dp-pp".
    Experts are spread over data- and context-parallel ranks, so `ep` adds no ranks.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if size < 1:
                raise ConfigError(f"topology: {axis.name} is {size}; every axis has 1 rank or more")

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
        _check_chunks(counts, vpp, both_ends=first is not None and last is not None)
        stages: list[list[range]] = [[] for _ in range(pp)]
        start = 0
        for _ in range(vpp):
            for stage, count in zip(stages, counts, strict=True):
                stage.append(range(start, start + count // vpp))
                start += count // vpp
        assert start == num_layers
        return cls(tuple(tuple(stage) for stage in stages))

    def owner(self, layer: int) -> tuple[int, int]:
        """(pipeline stage, chunk) that holds a global layer."""
        for pp, chunks in enumerate(self.stages):
            for chunk, layers in enumerate(chunks):
                if layer in layers:
                    return pp, chunk
        raise AssertionError(f"layer {layer} is in no stage of {self.stages}")


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


def _check_chunks(counts: list[int], vpp: int, *, both_ends: bool) -> None:
    if vpp == 1:
        return
    key = "virtual_pipeline_model_parallel_size"
    if len(counts) == 1:
        raise ConfigError(f"{key}={vpp} needs pipeline_model_parallel_size of at least 2; use 1")
    if len(counts) == 2 and both_ends:
        # Megatron-Core's offset divides by the number of stages between the two ends.
        raise ConfigError(f"{key}={vpp} with 2 stages takes {_FIRST} or {_LAST}, not both")
    common = math.gcd(*counts)
    if common % vpp:
        legal = [size for size in range(1, common + 1) if common % size == 0]
        raise ConfigError(
            f"{key}={vpp} does not divide the layers per stage {counts}; use one of {legal}"
        )


@dataclass(frozen=True)
class Placement:
    """One rank's place in the grid, and the parts of the model it holds."""

    topology: Topology
    coords: Coords
    split: LayerSplit

    def layers(self, chunk: int) -> range:
        """Global numbers of the layers in this rank's model chunk `chunk`."""
        return self.split.stages[self.coords.pp][chunk]

    def holds_embedding(self, chunk: int) -> bool:
        """Whether this chunk is the first of the pipeline."""
        return self.coords.pp == 0 and chunk == 0

    def holds_head(self, chunk: int) -> bool:
        """Whether this chunk is the last of the pipeline."""
        return self.coords.pp == self.topology.pp - 1 and chunk == self.topology.vpp - 1
