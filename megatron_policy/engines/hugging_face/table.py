"""The table of a sharded transformers model: an entry for each parameter, or for each expert of a
stacked one, with this rank's part of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows import Ignore, Role
from megatron_policy.converters.rows.blocks import Block, Ranges, Shape, Within
from megatron_policy.converters.rows.expert_rows import Stacked
from megatron_policy.converters.rows.kinds import RowBase
from megatron_policy.converters.table import EMBEDDING, HEAD, LAYER, Entry, Table
from megatron_policy.engines.hugging_face.decoder import Decoder
from megatron_policy.engines.hugging_face.module import SourceTensors
from megatron_policy.engines.hugging_face.sharding import Sharding
from megatron_policy.weights.load import Held


@dataclass(frozen=True)
class ShardRow(RowBase):
    """HF tensors of the shapes `parts`, one after another along their first dimension. Ranks hold
    consecutive indices along `dim`, as many each as `torch.chunk` gives; None: all hold all of it.
    Names are left to entries, so that layers share rows.
    """

    parts: tuple[Shape, ...] = field(kw_only=True)
    dim: int | None = field(default=0, kw_only=True)
    of: Within | None = field(default=None, kw_only=True)

    @property
    def within(self) -> Within | None:
        return self.of

    @property
    def whole(self) -> Shape:
        """The shape of the parameter that ranks hold between them."""
        if not self.parts[0]:
            return ()
        return (sum(rows for rows, *_ in self.parts), *self.parts[0][1:])

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return self.parts

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        """Of the first rank: the last ones can have less, or nothing."""
        return self._box(0, size)[1]

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        if not self.whole:
            return (Block(0, (1,), (slice(None),), (1,), (slice(None),)),)
        first, local = self._box(rank, size)
        if not math.prod(local):
            return ()
        found, start = [], 0
        for part, shape in enumerate(self.parts):
            low, high = max(start, first[0]), min(start + shape[0], first[0] + local[0])
            if low < high:
                others = tuple(
                    slice(at, at + length) for at, length in zip(first[1:], local[1:], strict=True)
                )
                rows, own = slice(low - start, high - start), slice(low - first[0], high - first[0])
                found.append(Block(part, shape, (rows, *others), local, (own,)))
            start += shape[0]
        return tuple(found)

    def _box(self, rank: int, size: int) -> tuple[Shape, Shape]:
        """The first index and the length of a rank's share in each dimension."""
        first, local = [0] * len(self.whole), list(self.whole)
        if self.dim is not None and local:
            each = -(-local[self.dim] // size)
            first[self.dim] = min(rank * each, local[self.dim])
            local[self.dim] = min(each, local[self.dim] - first[self.dim])
        return tuple(first), tuple(local)


@dataclass(frozen=True)
class RangeRow(ShardRow):
    """As `ShardRow`, but each rank holds consecutive elements of the flat parameter: rank r those
    of `flat[r]`, first to last (exclusive).
    """

    flat: Ranges = field(kw_only=True)

    @property
    def ranges(self) -> Ranges:
        return self.flat

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        """Of the first rank: others can have more, less, or nothing."""
        if size == 1:
            return self.whole
        first, last = self.flat[0]
        return (last - first,)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        if size == 1:
            return super().blocks(arch, 0, 1)
        (first, last), found, start = self.flat[rank], [], 0
        for part, elements in enumerate(map(math.prod, self.parts)):
            low, high = max(first, start), min(last, start + elements)
            if low < high:
                theirs, own = slice(low - start, high - start), slice(low - first, high - first)
                found.append(Block(part, (elements,), (theirs,), (last - first,), (own,)))
            start += elements
        return tuple(found)


@dataclass(frozen=True)
class Holding:
    """A parameter or buffer, and the entries of what this rank has of it."""

    tensor: torch.Tensor
    entries: tuple[Entry, ...]
    stacked: bool
    lengths: tuple[int, ...] | None = None
    """Of a range of a flat parameter, how many elements each entry has."""

    def views(self, of: torch.Tensor) -> list[torch.Tensor]:
        """For each entry its part of `of`, which is the tensor or has its shape."""
        local = local_part(of)
        if self.lengths is not None:
            return list(local.split(self.lengths))
        return list(local) if self.stacked else [local]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank has of a tensor, without autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(frozen=True)
class ShardedTable:
    """The table of what ranks hold between them, and this rank's parameters. `held` are views that
    stay the same objects: others compare them by identity.
    """

    table: Table
    holdings: tuple[Holding, ...]
    held: Held


def sharded_table(
    decoder: Decoder, family: Table, sources: Mapping[str, SourceTensors], sharding: Sharding
) -> ShardedTable:
    """The table of `decoder`, as ranks hold it between them, in the order of the family's table;
    `sources` are by the names of the model itself.
    """
    saved = _saved_entries(family)
    roles = {name: entry.row.role for entry in family.exported() for name in entry.hf}
    layers = _layer_prefix(decoder)
    embedding = local_id(decoder.model.get_input_embeddings().weight)
    seen: set[int] = set()
    holdings = []
    for name, tensor in sharding.tensors():
        if name not in sources or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        at = re.match(layers, name)
        where = LAYER if at else EMBEDDING if local_id(tensor) == embedding else HEAD
        layer = int(at.group(1)) if at else None
        source = sources[name]
        entries = tuple(_entries(name, tensor, source, saved, roles, layer, where, sharding))
        lengths = _lengths(entries, sharding.rank)
        holdings.append(Holding(tensor, entries, source.stacked, lengths))
    order = {name: number for number, name in enumerate(family.hf_shapes())}
    if order:
        holdings.sort(key=lambda each: order[each.entries[0].hf[0]])
    held: Held = []
    for each in holdings:
        held += zip(each.entries, each.views(each.tensor), strict=True)
    table = replace(family, entries=tuple(entry for entry, _ in held))
    if not order:
        table = replace(table, ignored=_tied_copies(sharding, sources))
    return ShardedTable(table, tuple(holdings), held)


def _tied_copies(sharding: Sharding, sources: Mapping[str, SourceTensors]) -> dict[str, Ignore]:
    """HF tensors that repeat another, because the model has one parameter in both places."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in sharding.tensors():
        if name not in sources:
            continue
        ((own,),) = sources[name].names if not sources[name].stacked else (("",),)
        original = first.setdefault(id(tensor), own)
        if original != own:
            found[own] = Ignore(own, "a copy of tied weights", equals=original)
    return found


def local_id(tensor: torch.Tensor) -> int:
    """What two names of one tensor have in common."""
    return id(tensor)


def _layer_prefix(decoder: Decoder) -> str:
    """A pattern of the names of the layers' parameters, with the number of the layer."""
    first = decoder.layers[0]
    name: str = next(n for n, module in decoder.model.named_modules() if module is first)
    return re.escape(name.removesuffix("0")) + r"(\d+)\."


def _entries(
    name: str,
    tensor: torch.Tensor,
    source: SourceTensors,
    saved: Mapping[str, tuple[Entry, int]],
    roles: Mapping[str, Role],
    layer: int | None,
    where: str,
    sharding: Sharding,
) -> Iterator[Entry]:
    shape, dim, ranges = sharding.split_of(tensor, source.stacked)
    if source.stacked:
        shape, dim = shape[1:], None if dim is None else dim - 1
    for index, names in enumerate(source.names):
        rows = shape[:1] if not shape else (shape[0] // len(names),)
        parts: tuple[Shape, ...] = ((*rows, *shape[1:]),) * len(names)
        within, of = _within(names, saved)
        role = roles.get(names[0])
        if role is None:
            matrix = len(shape) > 1 and not name.endswith("bias")
            role = Role.MATRIX if matrix else Role.BIAS
        keeps = within.row.keeps_dtype if within else False
        learnt = isinstance(tensor, torch.nn.Parameter)
        row = ShardRow(
            "", ("",) * len(names), role=role, keeps_dtype=keeps, learnt=learnt,
            parts=parts, dim=dim, of=of,
        )  # fmt: skip
        if ranges is not None:
            row = RangeRow(**vars(row), flat=_nth(ranges, index, math.prod(shape)))
        expert = index if source.stacked else None
        own = f"{name}.{index}" if source.stacked else name
        yield Entry(own, names, row, layer, where, expert, within=within)


def _nth(ranges: Ranges, index: int, elements: int) -> Ranges:
    """What these ranges are of element number `index` of a stack, or of its only one."""
    start, end = index * elements, (index + 1) * elements
    clipped = ((min(max(a, start), end), min(max(b, start), end)) for a, b in ranges)
    return tuple((a - start, b - start) for a, b in clipped)


def _lengths(entries: Sequence[Entry], rank: int) -> tuple[int, ...] | None:
    """How many elements this rank has of each entry's flat parameter; None without ranges."""
    found = [entry.row.ranges for entry in entries]
    return tuple(b - a for a, b in (each[rank] for each in found if each is not None)) or None


def _saved_entries(family: Table) -> dict[str, tuple[Entry, int]]:
    """For each HF tensor that is a part of one parameter in training checkpoints, that parameter
    and the number of the part.
    """
    return {
        name: (entry, part)
        for entry in family.exported()
        if not isinstance(entry.row, Stacked)
        for part, name in enumerate(entry.hf)
    }


def _within(
    names: tuple[str, ...], saved: Mapping[str, tuple[Entry, int]]
) -> tuple[Entry | None, Within | None]:
    """The parameter of checkpoints that has all of these HF tensors; None if there is no such."""
    found = [saved.get(name) for name in names]
    if None in found:
        return None, None
    entries = {id(each[0]): each[0] for each in found if each is not None}
    if len(entries) > 1:
        return None, None
    (entry,) = entries.values()
    return entry, Within(entry.row, tuple(each[1] for each in found if each is not None))
