"""The table of a sharded transformers model: an entry for each parameter, or for each expert of a
stacked one, with this rank's part of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows import Ignore, Role
from megatron_policy.converters.rows.blocks import Block, Ranges, Shape, Within
from megatron_policy.converters.rows.expert_rows import Stacked
from megatron_policy.converters.rows.kinds import RowBase
from megatron_policy.converters.table import EMBEDDING, HEAD, LAYER, Entry, Table
from megatron_policy.engines.hugging_face.module import Decoder, SourceTensors
from megatron_policy.engines.hugging_face.sharding import Sharding, Split
from megatron_policy.errors import ConversionError
from megatron_policy.weights.load import Held


@dataclass(frozen=True)
class Cut:
    """How `ranks` tensor-parallel ranks share each HF tensor of a parameter: evenly along `dim`,
    where `copies` consecutive ranks have the same share; None: all have all of it. A vocabulary is
    padded, so that all shares are of one length.
    """

    ranks: int = 1
    dim: int | None = None
    copies: int = 1

    def share(self, shape: Shape, dim: int, rank: int) -> tuple[int, int, int]:
        """The first index along `dim`, how many follow, and how many that are with padding."""
        if dim != self.dim:
            return 0, shape[dim], shape[dim]
        rows = -(-shape[dim] // (self.ranks // self.copies))
        first = min(rank // self.copies * rows, shape[dim])
        return first, min(rows, shape[dim] - first), rows

    def is_first(self, rank: int) -> bool:
        """Whether a tensor-parallel rank holds the first copy of its share."""
        return rank % (self.ranks if self.dim is None else self.copies) == 0


WHOLE = Cut()


@dataclass(frozen=True)
class ShardRow(RowBase):
    """HF tensors of the shapes `parts`, one after another along their first dimension.

    Tensor-parallel ranks, which are consecutive, share them by `cut`. What one of them has, others
    with the same tensor-parallel rank share: they hold consecutive indices along `dim`, as many
    each as `torch.chunk` gives; None: all hold all of it. Names are left to entries, so that layers
    share rows.
    """

    parts: tuple[Shape, ...] = field(kw_only=True)
    dim: int | None = field(default=0, kw_only=True)
    of: Within | None = field(default=None, kw_only=True)
    cut: Cut = field(default=WHOLE, kw_only=True)

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

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        cut, at, _ = self._place(rank, size)
        if cut.dim != 0 or len(self.parts) > 1:
            return 0
        _, real, _ = cut.share(self.parts[0], 0, at)
        first, local = self._box(rank, size)
        return max(0, first[0] + local[0] - max(first[0], real))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        if not self.parts[0]:
            return (Block(0, (1,), (slice(None),), (1,), (slice(None),)),)
        cut, at, _ = self._place(rank, size)
        first, local = self._box(rank, size)
        if not math.prod(local):
            return ()
        found, start = [], 0
        for part, shape in enumerate(self.parts):
            (begin, real, length), *along = (cut.share(shape, d, at) for d in range(len(shape)))
            low, high = max(start, first[0]), min(start + real, first[0] + local[0])
            if low < high:
                others = tuple(
                    slice(own + at, own + at + length)
                    for (own, _, _), at, length in zip(along, first[1:], local[1:], strict=True)
                )
                rows = slice(low - start + begin, high - start + begin)
                held = slice(low - first[0], high - first[0])
                found.append(Block(part, shape, (rows, *others), local, (held,)))
            start += length
        return tuple(found)

    def _place(self, rank: int, size: int) -> tuple[Cut, int, tuple[int, int]]:
        """The cut among `size` ranks, the tensor-parallel rank, and which of the shards of its
        share a rank has.
        """
        cut = WHOLE if size == 1 else self.cut
        if size % cut.ranks:
            raise ConversionError(
                f"{size} ranks are not whole groups of {cut.ranks} tensor-parallel ranks: use a "
                "multiple"
            )
        return cut, rank % cut.ranks, (rank // cut.ranks, size // cut.ranks)

    def _box(self, rank: int, size: int) -> tuple[Shape, Shape]:
        """The first index and the length of a rank's shard in each dimension of its share."""
        cut, at, (number, shards) = self._place(rank, size)
        if not self.parts[0]:
            return (), ()
        local = [cut.share(self.parts[0], d, at)[2] for d in range(len(self.parts[0]))]
        local[0] = sum(cut.share(shape, 0, at)[2] for shape in self.parts)
        first = [0] * len(local)
        if self.dim is not None:
            each = -(-local[self.dim] // shards)
            first[self.dim] = min(number * each, local[self.dim])
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
class Shares:
    """What tensor-parallel ranks share of a model, by the names of parameters: the cuts of those
    that are cut, and those of whose gradient each rank has a part only.
    """

    ranks: int = 1
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of the whole parameters."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    partial: Collection[str] = ()

    def cut(self, name: str) -> Cut:
        """The cut of a parameter or buffer."""
        return self.cuts.get(name, Cut(self.ranks))


@dataclass(frozen=True)
class Holding:
    """A parameter or buffer, and the entries of what this rank has of it."""

    tensor: torch.Tensor
    entries: tuple[Entry, ...]
    stacked: bool
    lengths: tuple[int, ...] | None = None
    """Of a range of a flat parameter, how many elements each entry has."""
    cut: Cut = WHOLE
    partial: bool = False
    """Whether each tensor-parallel rank has a part of the gradient only."""

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter, and not frozen."""
        return isinstance(self.tensor, torch.nn.Parameter) and self.tensor.requires_grad

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
    decoder: Decoder,
    family: Table,
    sources: Mapping[str, SourceTensors],
    sharding: Sharding,
    shares: Shares,
) -> ShardedTable:
    """The table of `decoder`, as ranks hold it between them, in the order of the family's table;
    `sources` are by the names of the model itself, as are `shares`, which FSDP has sharded.
    """
    # The parameter of training checkpoints that an HF tensor is a part of, and the part's number.
    saved = {
        name: (entry, part)
        for entry in family.exported()
        if not isinstance(entry.row, Stacked)
        for part, name in enumerate(entry.hf)
    }
    roles = {name: entry.row.role for entry in family.exported() for name in entry.hf}
    shapes = family.hf_shapes()
    first = decoder.layers[0]
    prefix: str = next(name for name, each in decoder.model.named_modules() if each is first)
    layers = re.escape(prefix.removesuffix("0")) + r"(\d+)\."
    embedding = id(decoder.model.get_input_embeddings().weight)
    seen: set[int] = set()
    holdings = []
    for name, tensor in sharding.tensors():
        if name not in sources or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        at = re.match(layers, name)
        where = LAYER if at else EMBEDDING if id(tensor) == embedding else HEAD
        layer = int(at.group(1)) if at else None
        source = sources[name]
        split = sharding.split_of(tensor, source.stacked)
        if name in shares.shapes:
            split = split._replace(shape=shares.shapes[name])
        cut = shares.cut(name)
        given = (name, tensor, source, saved, roles, shapes, layer, where, split, cut)
        entries = tuple(_make_entries(*given))
        ranges = [entry.row.ranges for entry in entries]
        ends = (each[sharding.rank] for each in ranges if each is not None)
        lengths = tuple(last - first for first, last in ends) or None
        partial = name in shares.partial
        holdings.append(Holding(tensor, entries, source.stacked, lengths, cut, partial))
    order = {name: number for number, name in enumerate(shapes)}
    if order:
        holdings.sort(key=lambda each: order[each.entries[0].hf[0]])
    held: Held = []
    for each in holdings:
        held += zip(each.entries, each.views(each.tensor), strict=True)
    table = replace(family, entries=tuple(entry for entry, _ in held))
    if not order:
        table = replace(table, ignored=_find_tied_copies(sharding, sources))
    return ShardedTable(table, tuple(holdings), held)


def _find_tied_copies(
    sharding: Sharding, sources: Mapping[str, SourceTensors]
) -> dict[str, Ignore]:
    """HF tensors that repeat another, because the model has one parameter in both places."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in sharding.tensors():
        if name not in sources:
            continue
        own = "" if sources[name].stacked else sources[name].names[0][0]
        original = first.setdefault(id(tensor), own)
        if original != own:
            found[own] = Ignore(own, "a copy of tied weights", equals=original)
    return found


def _make_entries(
    name: str,
    tensor: torch.Tensor,
    source: SourceTensors,
    saved: Mapping[str, tuple[Entry, int]],
    roles: Mapping[str, Role],
    shapes: Mapping[str, Shape],
    layer: int | None,
    where: str,
    split: Split,
    cut: Cut,
) -> Iterator[Entry]:
    shape, dim, ranges = split
    if source.stacked:
        shape, dim = shape[1:], None if dim is None else dim - 1
    for index, names in enumerate(source.names):
        rows = shape[:1] if not shape else (shape[0] // len(names),)
        parts: tuple[Shape, ...] = ((*rows, *shape[1:]),) * len(names)
        if len(names) > 1:  # of different lengths, where a family says so
            parts = tuple(shapes.get(name, part) for name, part in zip(names, parts, strict=True))
        within, of = _find_within(names, saved)
        role = roles.get(names[0])
        if role is None:
            matrix = len(shape) > 1 and not name.endswith("bias")
            role = Role.MATRIX if matrix else Role.BIAS
        keeps = within.row.keeps_dtype if within else False
        learnt = isinstance(tensor, torch.nn.Parameter)
        row = ShardRow(
            "", ("",) * len(names), role=role, keeps_dtype=keeps, learnt=learnt,
            parts=parts, dim=dim, of=of, cut=cut,
        )  # fmt: skip
        if ranges is not None:
            # What they are of element number `index` of a stack, or of its only one.
            start, end = index * math.prod(shape), (index + 1) * math.prod(shape)
            clipped = ((min(max(a, start), end), min(max(b, start), end)) for a, b in ranges)
            row = RangeRow(**vars(row), flat=tuple((a - start, b - start) for a, b in clipped))
        expert = index if source.stacked else None
        own = f"{name}.{index}" if source.stacked else name
        yield Entry(own, names, row, layer, where, expert, within=within)


def _find_within(
    names: tuple[str, ...], saved: Mapping[str, tuple[Entry, int]]
) -> tuple[Entry | None, Within | None]:
    """The parameter of checkpoints that has all of these HF tensors; None if there is no such."""
    found = [saved[name] for name in names if name in saved]
    if len(found) < len(names) or len({id(entry) for entry, _ in found}) > 1:
        return None, None
    entry = found[0][0]
    return entry, Within(entry.row, tuple(part for _, part in found))
