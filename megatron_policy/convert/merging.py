"""The weights of a model with adapters added, as a checkpoint to read: `W + scale * B A`.

Computed in fp32, one rank of the adapter after another, by operations that round each element by
itself: the result is the same on every machine, whatever the memory. Source: Hu et al. 2021,
"LoRA". Shapes: O outputs, I inputs, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_policy.convert.adapters import Base, model_of
from megatron_policy.convert.open_checkpoint import (
    OpenCheckpoint,
    damaged_tensor,
)
from megatron_policy.converters.adapters import PREFIX, WEIGHT, A, B
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.scalar_head import TENSORS as SCALAR
from megatron_policy.errors import ConversionError
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.tensors import Info, Tensors

_ROWS, _COLUMNS = 32, 2048
"""Of what is computed at a time: few enough elements to stay in the processor's cache."""


class _Adapter(NamedTuple):
    """The adapter of a module, and the dtypes of its matrices."""

    module: str
    rank: int
    scale: float
    a: Info
    b: Info


class _Tile(NamedTuple):
    """Rows and columns of a matrix, and where the first is in a flat range of its elements; rows
    follow each other at every `stride` elements.
    """

    rows: range
    columns: range
    offset: int
    stride: int


def merged(
    adapters: OpenCheckpoint, base: Base, of_base: OpenCheckpoint, dtype: torch.dtype | None
) -> OpenCheckpoint:
    """The base with the adapters added, its weights in `dtype` or their own.

    ConversionError, naming tensors, for adapters that do not fit the base's weights.
    """
    found = adapters.adapters
    assert found is not None
    if found.settings.parameters:
        raise ConversionError(
            f"{found.root} has adapters of stacked experts (target_parameters), which are not "
            "merged here: start a policy from them (policy.megatron_cfg.peft.start_from) and call "
            "export_hf, or merge them with PEFT (merge_and_unload)"
        )
    shapes = {name: info.shape for name, info in adapters.infos.items()}
    of_weight = {
        module + WEIGHT: _Adapter(
            module,
            rank,
            alpha / rank,
            adapters.infos[f"{PREFIX}{module}{A}"],
            adapters.infos[f"{PREFIX}{module}{B}"],
        )
        for module, (rank, alpha) in found.modules(shapes).items()
    }
    _check(of_weight, of_base, base)
    _, table = model_of(found, base, adapters.infos, of_base.infos)
    head = {name: adapters.infos[at] for name in SCALAR if (at := PREFIX + name) in adapters.infos}
    of_head = {PREFIX + name for name in head}
    changed = of_weight.keys() | head.keys()
    stated = of_base.manifest.tensors if of_base.manifest else {}
    digests = {name: digest for name, (_, digest) in stated.items() if name in of_weight}
    infos = {
        name: replace(info, dtype=dtype) if dtype is not None and name in changed else info
        for name, info in {**of_base.infos, **head}.items()
    }
    manifest = of_base.manifest
    if manifest is not None:  # what is read is not what its digests are of
        rest = {name: each for name, each in manifest.tensors.items() if name not in changed}
        manifest = replace(manifest, tensors=rest)
    return replace(
        of_base,
        infos=infos,
        tensors=_MergedTensors(of_base, adapters.tensors, of_weight, digests, of_head),
        table=replace(table, fresh={}),  # the adapters have what the base lacks
        manifest=manifest,
        step=adapters.step,
        overrides=table.overrides,
        merged=adapters.root,
    )


def _check(of_weight: Mapping[str, _Adapter], of_base: OpenCheckpoint, base: Base) -> None:
    problems = []
    for weight, adapter in of_weight.items():
        found = of_base.infos.get(weight)
        wanted = (*adapter.b.shape[:1], *adapter.a.shape[1:])
        if found is None:
            problems.append(f"{base.root} has no {weight}")
        elif adapter.b.shape[1:] != adapter.a.shape[:1] or found.shape != wanted:
            problems.append(
                f"{weight} is {_shown(found.shape)}, but its adapter's A and B are "
                f"{_shown(adapter.a.shape)} and {_shown(adapter.b.shape)}"
            )
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConversionError(
            "the adapters do not fit the base:\n  " + "\n  ".join(problems[:20]) + more
        )


class _MergedTensors:
    """The tensors of a checkpoint, those of `adapters` with these added. Ranges of a tensor are
    read in order, from its first element on: the base's bytes are compared with their digest.
    """

    def __init__(
        self,
        base: OpenCheckpoint,
        tensors: Tensors,
        adapters: Mapping[str, _Adapter],
        digests: Mapping[str, str],
        head: Collection[str],
    ) -> None:
        """`head` are tensors of a scalar head, by PEFT's names, which are those of the adapters."""
        self._base, self._of_adapters = base, tensors
        self._adapters, self._digests, self._head = adapters, digests, head
        self._seen: tuple[str, Digest] = ("", Digest())

    def read(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        """See `Tensors.read`."""
        if (own_name := PREFIX + name) in self._head:
            self._of_adapters.read(own_name, first, values, scratch)
            return
        adapter, info = self._adapters.get(name), self._base.infos[name]
        if adapter is None or not values.numel():
            self._base.tensors.read(name, first, values, scratch)
            return
        own = values
        if info.dtype != values.dtype:
            own = torch.empty(values.numel(), dtype=info.dtype)
        self._base.tensors.read(name, first, own, scratch)
        self._compare(name, info, first, own)
        self._add(adapter, first, own, values)

    def write(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        """It is only read."""
        raise AssertionError(f"{name} is computed")

    def scratch(self, name: str, dtype: torch.dtype) -> int:
        """See `Tensors.scratch`; torch allocates what merging takes."""
        if (own_name := PREFIX + name) in self._head:
            return self._of_adapters.scratch(own_name, dtype)
        own = self._base.tensors.scratch(name, self._base.infos[name].dtype)
        if name not in self._adapters:
            return self._base.tensors.scratch(name, dtype)
        adapter = self._adapters[name]
        of_b = -(-adapter.rank * (4 + adapter.b.dtype.itemsize) // max(adapter.a.shape[1], 1))
        return own + self._base.infos[name].dtype.itemsize + of_b

    def _compare(self, name: str, info: Info, first: int, values: Tensor) -> None:
        if name not in self._digests:
            return
        if first == 0:
            self._seen = (name, Digest())
        seen, digest = self._seen
        assert seen == name, "ranges come in order"
        digest.update(values)
        if first + values.numel() == info.elements and digest.text() != self._digests[name]:
            raise damaged_tensor(self._base.root, name)

    def _add(self, adapter: _Adapter, first: int, own: Tensor, values: Tensor) -> None:
        """Write the sum of the range `own` of a weight and of its adapter's product to `values`."""
        rank, inputs = adapter.a.shape
        rows = range(first // inputs, -(-(first + own.numel()) // inputs))
        b_OR = self._part(adapter, B, rows.start * rank, len(rows) * rank).view(len(rows), rank)
        b_OR.mul_(adapter.scale)
        for columns, tiles in _tiles(first, own.numel(), inputs):
            starts = (r * inputs + columns.start for r in range(rank))
            a_RI = torch.stack([self._part(adapter, A, at, len(columns)) for at in starts])
            for tile in tiles:
                _add_product(tile, rows.start, a_RI, b_OR, own, values)

    def _part(self, adapter: _Adapter, side: str, first: int, count: int) -> Tensor:
        """A range of one of the adapter's matrices, in fp32."""
        name = f"{PREFIX}{adapter.module}{side}"
        dtype = (adapter.a if side == A else adapter.b).dtype
        values = torch.empty(count, dtype=dtype)
        spare = torch.empty(count * self._of_adapters.scratch(name, dtype), dtype=torch.uint8)
        self._of_adapters.read(name, first, values, spare)
        return values.float()


def _add_product(
    tile: _Tile, first_row: int, a_RI: Tensor, b_OR: Tensor, own: Tensor, values: Tensor
) -> None:
    size, stride = (len(tile.rows), len(tile.columns)), (tile.stride, 1)
    total = torch.zeros(size)
    product = torch.empty(size)
    mine = b_OR[tile.rows.start - first_row : tile.rows.stop - first_row]
    for r in range(len(a_RI)):
        total += torch.mul(mine[:, r : r + 1], a_RI[r], out=product)
    total += own.as_strided(size, stride, own.storage_offset() + tile.offset)
    target = values.as_strided(size, stride, values.storage_offset() + tile.offset)
    target.copy_(total)
    # Of these dtypes only float16 is narrow enough for weights to leave its range.
    if target.dtype == torch.float16 and torch.isinf(target).any():
        raise ConversionError(
            "merged weights are beyond the range of float16: convert with dtype='bfloat16'"
        )


def _tiles(first: int, count: int, inputs: int) -> Iterator[tuple[range, list[_Tile]]]:
    """The elements `first` to `first + count` of a flat matrix with `inputs` columns: for some
    columns at a time, the tiles in them.
    """
    for rows, whole in _bands(first, count, inputs):
        for low in range(whole.start, whole.stop, _COLUMNS):
            columns = range(low, min(low + _COLUMNS, whole.stop))
            parts = (rows[at : at + _ROWS] for at in range(0, len(rows), _ROWS))
            offset = low - first
            yield columns, [_Tile(r, columns, r.start * inputs + offset, inputs) for r in parts]


def _bands(first: int, count: int, inputs: int) -> Iterator[tuple[range, range]]:
    """Rows and columns: the rest of a row, whole rows, and the beginning of another."""
    last = first + count
    while first < last:
        row, column = divmod(first, inputs)
        whole = (last - first) // inputs if column == 0 else 0
        if whole:
            yield range(row, row + whole), range(inputs)
            first += whole * inputs
        else:
            end = min(last, (row + 1) * inputs)
            yield range(row, row + 1), range(column, column + end - first)
            first = end


def _shown(shape: Shape) -> str:
    return str(list(shape))
