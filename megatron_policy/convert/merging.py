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

from megatron_policy.adapters.opening import Base, bind_base
from megatron_policy.adapters.table import (
    PREFIX,
    WEIGHT,
    A,
    B,
    bind_adapters,
    find_module,
    is_stacked,
    list_stacked_parameters,
    name_module,
    name_parameter,
)
from megatron_policy.convert.open_checkpoint import (
    OpenCheckpoint,
    damaged_tensor,
)
from megatron_policy.converters.mismatch import list_problems
from megatron_policy.converters.scalar_head import TENSORS as SCALAR
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConversionError
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.tensors import Info, Tensors

_ROWS, _COLUMNS = 32, 2048
"""Of what is computed at a time: few enough elements to stay in the processor's cache."""


class _Adapter(NamedTuple):
    """The adapter of a module, and the dtypes of its matrices."""

    module: str
    scale: float
    a: Info
    b: Info
    expert: int = 0
    experts: int = 1
    """Which one of how many experts it is of, whose adapters are stacked in A and B."""
    part: int = 0
    parts: int = 1
    """Which one of how many equal parts of its outputs the weight has."""

    @property
    def rank(self) -> int:
        """Rows of the A of one expert."""
        return self.a.shape[0] // self.experts

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return (self.b.shape[0] // self.parts, *self.a.shape[1:])


def merge_adapters(
    adapters: OpenCheckpoint, base: Base, of_base: OpenCheckpoint, dtype: torch.dtype | None
) -> OpenCheckpoint:
    """The base with the adapters added, its weights in `dtype` or their own.

    ConversionError, naming tensors, for adapters that do not fit the base's weights.
    """
    found = adapters.adapters
    assert found is not None
    shapes = {name: info.shape for name, info in adapters.infos.items()}
    of_tensors = {name: info.shape for name, info in of_base.infos.items()}
    _, table = bind_base(found, base, adapters.infos, of_tensors)
    parameters = found.find_parameters(list_stacked_parameters(table), base.root)
    weights = {name_module(name, table): name for name in of_base.infos if name.endswith(WEIGHT)}
    of_weight = {
        weights.get(module, module + WEIGHT): _Adapter(
            module,
            alpha / rank,
            adapters.infos[f"{PREFIX}{module}{A}"],
            adapters.infos[f"{PREFIX}{module}{B}"],
        )
        for module, (rank, alpha) in found.find_modules(shapes, parameters).items()
    }
    of_weight |= _find_stacked(adapters, table, parameters)
    _check(of_weight, of_base, base)
    head = {name: adapters.infos[at] for name in SCALAR if (at := PREFIX + name) in adapters.infos}
    of_head = {PREFIX + name for name in head}
    changed = of_weight.keys() | head.keys()
    infos = {
        name: replace(info, dtype=dtype) if dtype is not None and name in changed else info
        for name, info in {**of_base.infos, **head}.items()
    }
    manifest, digests = of_base.manifest, dict[str, str]()
    if manifest is not None:  # what is read is not what its digests are of
        stated = manifest.tensors
        digests = {name: digest for name, (_, digest) in stated.items() if name in of_weight}
        rest = {name: each for name, each in stated.items() if name not in changed}
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


def _find_stacked(
    adapters: OpenCheckpoint, table: Table, parameters: Collection[str]
) -> dict[str, _Adapter]:
    """The adapters of experts' weights that are stacked, on `parameters` of the model of `table`.

    ConversionError if the weights are stacked too.
    """
    found, moe = adapters.adapters, table.architecture.moe
    if not parameters:
        return {}
    assert found is not None and moe is not None
    bases = {entry.megatron: entry for entry in table.entries}
    stacks = bind_adapters(table, 1, (), lambda _: True, parameters)
    of_weight = {}
    for entry in stacks.entries:
        module, base = find_module(entry.hf[0]), bases[entry.adapts]
        if is_stacked(base):
            raise ConversionError(
                f"{found.root} has adapters of stacked experts ({name_parameter(base, table)}), "
                "which are not merged into a base that stacks them: start a policy from them "
                "(policy.megatron_cfg.peft.start_from) and call export_hf, or merge them with PEFT "
                "(merge_and_unload)"
            )
        if not module:  # it is the entry of B
            continue
        rank, alpha = found.settings.find_scale(name_parameter(base, table))
        a, b = (adapters.infos[f"{PREFIX}{module}{side}"] for side in (A, B))
        whole = _Adapter(module, alpha / rank, a, b, base.expert or 0, moe.experts)
        for number, weight in enumerate(base.hf):
            of_weight[weight] = whole._replace(part=number, parts=len(base.hf))
    return of_weight


def _check(of_weight: Mapping[str, _Adapter], of_base: OpenCheckpoint, base: Base) -> None:
    problems = []
    for weight, adapter in of_weight.items():
        found = of_base.infos.get(weight)
        if found is None:
            problems.append(f"{base.root} has no {weight}")
        elif adapter.b.shape[1:] != adapter.a.shape[:1] or found.shape != adapter.shape:
            problems.append(
                f"{weight} is {list(found.shape)}, but its adapter's A and B are "
                f"{list(adapter.a.shape)} and {list(adapter.b.shape)}"
            )
    if problems:
        raise ConversionError(f"the adapters do not fit the base:\n{list_problems(problems)}")


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
        if name in self._digests:
            if first == 0:
                self._seen = (name, Digest())
            seen, digest = self._seen
            assert seen == name, "ranges come in order"
            digest.update(own)
            if first + own.numel() == info.elements and digest.text() != self._digests[name]:
                raise damaged_tensor(self._base.root, name)
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
        columns, inputs = adapter.a.shape
        of_b = -(-columns * (4 + adapter.b.dtype.itemsize) // max(inputs, 1))
        return own + self._base.infos[name].dtype.itemsize + of_b

    def _add(self, adapter: _Adapter, first: int, own: Tensor, values: Tensor) -> None:
        """Write the sum of the range `own` of a weight and of its adapter's product to `values`."""
        (every, inputs), rank = adapter.a.shape, adapter.rank
        rows = range(first // inputs, -(-(first + own.numel()) // inputs))
        above = adapter.part * adapter.shape[0]
        b = self._part(adapter, B, (above + rows.start) * every, len(rows) * every)
        b_OR = b.view(len(rows), rank, adapter.experts)[..., adapter.expert] * adapter.scale
        for band, columns in _cut(first, own.numel(), inputs):
            own_rows = range(adapter.expert * rank, (adapter.expert + 1) * rank)
            starts = (r * inputs + columns.start for r in own_rows)
            a_RI = torch.stack([self._part(adapter, A, at, len(columns)) for at in starts])
            for tile in (band[at : at + _ROWS] for at in range(0, len(band), _ROWS)):
                size = len(tile), len(columns)
                at = tile.start * inputs + columns.start - first
                own_OI, values_OI = (
                    t.as_strided(size, (inputs, 1), t.storage_offset() + at) for t in (own, values)
                )
                _add_product(a_RI, b_OR[tile.start - rows.start :][: len(tile)], own_OI, values_OI)

    def _part(self, adapter: _Adapter, side: str, first: int, count: int) -> Tensor:
        """A range of one of the adapter's matrices, in fp32."""
        name = f"{PREFIX}{adapter.module}{side}"
        dtype = (adapter.a if side == A else adapter.b).dtype
        values = torch.empty(count, dtype=dtype)
        spare = torch.empty(count * self._of_adapters.scratch(name, dtype), dtype=torch.uint8)
        self._of_adapters.read(name, first, values, spare)
        return values.float()


def _add_product(a_RI: Tensor, b_OR: Tensor, own_OI: Tensor, values_OI: Tensor) -> None:
    """Write the sum of some elements of a weight and of its adapter's product to `values`."""
    total, product = torch.zeros(own_OI.shape), torch.empty(own_OI.shape)
    for r in range(len(a_RI)):
        total += torch.mul(b_OR[:, r : r + 1], a_RI[r], out=product)
    total += own_OI
    values_OI.copy_(total)
    # Of these dtypes only float16 is narrow enough for weights to leave its range.
    if values_OI.dtype == torch.float16 and torch.isinf(values_OI).any():
        raise ConversionError(
            "merged weights are beyond the range of float16: convert with dtype='bfloat16'"
        )


def _cut(first: int, count: int, inputs: int) -> Iterator[tuple[range, range]]:
    """Rows and columns of the elements `first` to `first + count` of a flat matrix with `inputs`
    columns: the rest of a row, whole rows, and the beginning of another, some columns at a time.
    """
    last = first + count
    while first < last:
        row, column = divmod(first, inputs)
        rows = max((last - first) // inputs, 1) if column == 0 else 1
        end = min(column + last - first, inputs)
        for low in range(column, end, _COLUMNS):
            yield range(row, row + rows), range(low, min(low + _COLUMNS, end))
        first += (rows - 1) * inputs + end - column
