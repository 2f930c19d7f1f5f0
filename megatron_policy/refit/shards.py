"""Which trainer sends which elements to which rank of an engine that is split as well: each engine
rank gets its own elements, each of them once, and the replicas of a trainer's shard take turns.

Pure: the plan is the same on every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import blocks_of, of_expert
from megatron_policy.converters.rows.expert_rows import Stacked
from megatron_policy.converters.rows.regions import Region, flatten, regions
from megatron_policy.converters.table import HEAD, LAYER, Entry
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.buffers import align
from megatron_policy.refit.index_spans import IndexSpan, Move
from megatron_policy.refit.plan import STREAM_ALIGNMENT, Item, RefitPlan, RefitTensor
from megatron_policy.weights.geometry import Segment, segments

_PIECE = 32 * 2**20
"""Bytes from which an engine rank's part comes in several pieces: each can have another sender."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineShards:
    """Where an engine has an HF tensor: the ranks `holders[n]` have indices `n * chunk` to
    `(n + 1) * chunk` of dimension `dim`, those that exist, as a contiguous tensor. ConfigError for
    a rank with two of these parts, or that is named twice.
    """

    dim: int
    chunk: int
    holders: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        try:
            ranks = [rank for part in self.holders for rank in part]
        except TypeError:
            ranks = []
        if not ranks or not all(isinstance(n, int) for n in (self.dim, self.chunk, *ranks)):
            raise ConfigError(
                f"{self!r:.200} names no ranks by numbers: give dim and chunk, and the ranks that "
                "have each part, as in EngineShards(0, 64, ((0,), (1,)))"
            )
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise ConfigError(
                f"{self!r:.200} names rank {twice} more than once: a rank holds one part of a "
                "tensor, and is named there once. Give each of its parts a rank of its own, or one "
                "rank the whole tensor: EngineShards(0, length, ((rank,),))"
            )

    def shape(self, whole: Shape, part: int) -> Shape:
        """The shape of what the ranks `holders[part]` have."""
        low, high = self.bounds(whole, part)
        return (*whole[: self.dim], high - low, *whole[self.dim + 1 :])

    def bounds(self, whole: Shape, part: int) -> tuple[int, int]:
        """Their indices: the first, and the one after the last."""
        size = whole[self.dim]
        return min(part * self.chunk, size), min((part + 1) * self.chunk, size)


class ShardTransfer(NamedTuple):
    """What trainer `source` sends of a tensor to engine rank `target`, which has `shape` of it."""

    source: int
    target: int
    tensor: RefitTensor
    entry: Entry
    shape: Shape
    moves: tuple[Move, ...]
    elements: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.tensor.dtype.itemsize


@dataclass(frozen=True)
class ShardPlan:
    """All transfers of a refit, in the order of the tensors for each pair of ranks."""

    transfers: tuple[ShardTransfer, ...]
    trainers: int
    engine_ranks: int

    @cached_property
    def by_source(self) -> Mapping[int, Sequence[ShardTransfer]]:
        """The transfers of each trainer."""
        found = defaultdict(list)
        for transfer in self.transfers:
            found[transfer.source].append(transfer)
        return found

    @cached_property
    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes from each trainer to each engine rank, of those that exchange any."""
        found: defaultdict[tuple[int, int], int] = defaultdict(int)
        for (source, target, dtype), elements in self._link_elements.items():
            found[source, target] += elements * dtype.itemsize
        return found

    def scale_links(self, sizes: Mapping[torch.dtype, float]) -> Mapping[tuple[int, int], float]:
        """The same where elements of each dtype take so many bytes."""
        found: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (source, target, dtype), elements in self._link_elements.items():
            found[source, target] += elements * sizes[dtype]
        return found

    @cached_property
    def _link_elements(self) -> Mapping[tuple[int, int, torch.dtype], int]:
        found: defaultdict[tuple[int, int, torch.dtype], int] = defaultdict(int)
        for transfer in self.transfers:
            found[transfer.source, transfer.target, transfer.tensor.dtype] += transfer.elements
        return found

    @property
    def sent(self) -> list[int]:
        """Bytes that each trainer sends."""
        return self._sums(0, self.trainers)

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes of each trainer's copies of what it sends, one for each engine rank, with which it
        finds what has changed.
        """
        sums = [0] * self.trainers
        for transfer in self.transfers:
            sums[transfer.source] += align(transfer.nbytes, STREAM_ALIGNMENT)
        return sums

    @property
    def received(self) -> list[int]:
        """Bytes that each engine rank receives."""
        return self._sums(1, self.engine_ranks)

    def _sums(self, end: int, ranks: int) -> list[int]:
        sums = [0] * ranks
        for link, nbytes in self.link_bytes.items():
            sums[link[end]] += nbytes
        return sums


class _Overlap(NamedTuple):
    """What a trainer's shard has of a part of the engine's."""

    shard: int
    part: int
    shape: Shape
    moves: tuple[Move, ...]
    elements: int


def plan_shards(
    plan: RefitPlan,
    architecture: Architecture,
    topology: Topology,
    placements: Mapping[str, EngineShards],
    engine_ranks: int,
) -> ShardPlan:
    """The transfers of a refit plan's tensors, of all stages. Of several trainers with the same
    elements the one sends that has sent least. ConfigError for a tensor that the engine does not
    place whole.
    """
    if not isinstance(placements, Mapping):
        raise ConfigError(
            f"the engine's layout is {placements!r:.80}: give an EngineShards for each tensor"
        )
    for name, held in placements.items():
        if not isinstance(held, EngineShards):
            raise ConfigError(
                f"the engine's layout has {held!r:.80} for {name}: give an EngineShards"
            )
    names = {tensor.name for tensor in plan.tensors}
    if unknown := [name for name in placements if name not in names]:
        raise ConfigError(
            f"the engine's layout has {', '.join(unknown[:8])}, which the trainer does not send: "
            "name the tensors as prepare_refit_info does"
        )
    replicas = _Replicas(topology)
    holding = {rank for of in placements.values() for part in of.holders for rank in part}
    if holding != set(range(engine_ranks)):
        raise ConfigError(
            f"the engine's layout is of ranks {sorted(holding)}, but the group has {engine_ranks} "
            "engine ranks: each holds a part of some tensor"
        )
    known: dict[object, list[_Overlap]] = {}
    sent, found = [0] * topology.world_size, list[ShardTransfer]()
    # Experts first: fewer trainers have the same one, and others can make up for them.
    for exchange in sorted(plan.exchanges, key=lambda exchange: not exchange.of_experts):
        for item in exchange.items:
            tensor, size = item.tensor, item.tensor.dtype.itemsize
            placement = _find_placement(tensor, placements)
            cut_by = (placement.dim, placement.chunk, tensor.shape, size)
            for number, entry in enumerate(item.entries):
                key = (id(entry.row), item.part, exchange.split, cut_by)
                if key not in known:
                    parts = [
                        segments(entry.row, architecture, item.part, shard, exchange.split)
                        for shard in range(exchange.split)
                    ]
                    known[key] = list(_cuts(parts, placement, tensor.shape, size))
                owner = item.owner if len(item.entries) == 1 else number
                for cut in known[key]:
                    sources = replicas.of(exchange.of_experts, tensor.stage, owner, cut.shard)
                    for target in placement.holders[cut.part]:
                        source = min(sources, key=sent.__getitem__)
                        sent[source] += cut.elements * size
                        found.append(ShardTransfer(source, target, tensor, entry, *cut[2:]))
    return ShardPlan(tuple(found), topology.world_size, engine_ranks)


def place_on_grid(
    plan: RefitPlan, architecture: Architecture, grid: Topology
) -> dict[str, EngineShards]:
    """The placements of an engine that splits tensors as Megatron-Core would over that grid, with
    layers in equal runs over its stages; what that does not split along one dimension is whole.
    """
    replicas, found = _Replicas(grid), dict[str, EngineShards]()
    known: dict[object, tuple[int, int, list[list[int]]]] = {}
    for item in plan.items:
        entry, shape = item.entry, item.tensor.shape
        apart = grid.experts_apart and of_expert(entry.row.megatron)
        if apart and isinstance(entry.row, Stacked):
            dim, chunk = 0, shape[0] // grid.ep
            parts = [[(ep, etp) for etp in range(grid.expert_tp)] for ep in range(grid.ep)]
        else:
            key = id(entry.row), item.part
            if key not in known:
                known[key] = _split(item, architecture, grid.expert_tp if apart else grid.tp)
            dim, chunk, groups = known[key]
            owner = 0
            if apart and architecture.moe is not None and entry.expert is not None:
                owner = grid.expert_owner(entry.expert, architecture.moe.experts)
            parts = [[(owner, shard) for shard in group] for group in groups]
        stage = (grid.pp - 1) * (entry.where == HEAD)
        if entry.where == LAYER and entry.layer is not None:
            stage = entry.layer * grid.pp // architecture.num_layers
        stages = {stage}
        if architecture.tied and entry.megatron.startswith("embedding.word_embeddings."):
            stages.add(grid.pp - 1)  # the head is a copy of it
        holders = (
            tuple(r for at in part for of in sorted(stages) for r in replicas.of(apart, of, *at))
            for part in parts
        )
        found[item.tensor.name] = EngineShards(dim, chunk, tuple(holders))
    return found


class _Replicas:
    """The ranks of a grid that hold the same."""

    def __init__(self, grid: Topology) -> None:
        self._found: defaultdict[tuple[bool, int, int, int], list[int]] = defaultdict(list)
        for rank in range(grid.world_size):
            at, of_experts = grid.coords(rank), grid.expert_coords(rank)
            self._found[False, at.pp, 0, at.tp].append(rank)
            self._found[True, at.pp, of_experts.ep, of_experts.etp].append(rank)

    def of(self, experts: bool, stage: int, owner: int, shard: int) -> Sequence[int]:
        """Those that hold that shard, of `owner`'s experts or of all else."""
        return self._found[experts, stage, owner if experts else 0, shard]


def _find_placement(tensor: RefitTensor, placements: Mapping[str, EngineShards]) -> EngineShards:
    placement, shape = placements.get(tensor.name), tensor.shape or (1,)
    if placement is None:
        raise ConfigError(f"the engine's layout lacks {tensor.name}: say which ranks hold it")
    dim, chunk, holders = placement.dim, placement.chunk, placement.holders
    if not 0 <= dim < len(shape) or chunk * len(holders) < shape[dim] or not all(holders):
        raise ConfigError(
            f"the engine's layout does not hold all of {tensor.name}, {list(shape)}: it has "
            f"{len(holders)} times {chunk} indices of dimension {dim}"
        )
    return placement


def _cuts(
    shards: Sequence[Sequence[Segment]], placement: EngineShards, shape: Shape, itemsize: int
) -> Iterator[_Overlap]:
    """What each shard has of each of the engine's parts, and of each piece of a large part."""
    pieces = [[(hf, own) for s in of for _, hf, own in s.pieces(0, s.elements)] for of in shards]
    whole = shape or (1,)
    for part in range(len(placement.holders)):
        low, high = placement.bounds(whole, part)
        own_shape = placement.shape(whole, part)
        step = max(1, -(-(high - low) // max(1, math.prod(own_shape) * itemsize // _PIECE)))
        for first in range(low, high, step):
            span = IndexSpan(whole, placement.dim, first, min(first + step, high), low, high)
            for shard, of in enumerate(pieces):
                moves = tuple(move for hf, own in of for move in span.moves(hf, own))
                if moves:
                    elements = sum(move.own.elements for move in moves)
                    yield _Overlap(shard, part, own_shape if shape else (), moves, elements)


def _split(item: Item, architecture: Architecture, size: int) -> tuple[int, int, list[list[int]]]:
    """Along which dimension `size` ranks split the tensor, in which chunks, and which ranks have
    each of them.
    """
    row, shape = item.entry.row, item.tensor.shape or (1,)
    sides: dict[tuple[Region, ...], list[int]] = {}
    for rank in range(size):
        held = blocks_of(row, architecture, rank, size)
        own = tuple(flatten(regions(b)[0]) for b in held if b.part == item.part)
        sides.setdefault(own, []).append(rank)
    first, whole = next(iter(sides)), math.prod(shape)
    everywhere = 0, shape[0], [list(range(size))]
    if len(sides) == 1 or len(first) != 1:
        return everywhere
    (region,) = first
    for dim, length in enumerate(shape):
        chunk, over = divmod(region.elements, whole // length)
        last = whole - 1 - (length - chunk) * math.prod(shape[dim + 1 :])
        if not over and region.ends == (0, last) and -(-length // chunk) <= len(sides):
            return dim, chunk, list(sides.values())
    return everywhere
