"""Low-rank adapters as rows: the parameters that they add to a model, by the names of PEFT.

A linear layer's weight W becomes `W + scale * B A`. Source: Hu et al. 2021, "LoRA"; names and
shapes are those of Hugging Face PEFT. Ranks split A and B as they split W: the outputs of a
column-parallel layer are B's rows, the inputs of a row-parallel one A's columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Block, Role, Row, Shape, even, fill_shard, nth
from megatron_policy.converters.rows.kinds import (
    ALL,
    Columns,
    GateUp,
    Ignore,
    Joined,
    Qkv,
    RowBase,
    Rows,
    Whole,
)
from megatron_policy.converters.table import LAYER, Entry, Table
from megatron_policy.errors import ConversionError

WEIGHT = ".weight"
_ROUTER = ".mlp.router."
PREFIX = "base_model.model."
"""What PEFT puts before the name of the module that it adapts."""
A, B = ".lora_A.weight", ".lora_B.weight"
_IN, _OUT = ".adapter.a", ".adapter.b"
_SHOWN = 5

Parts = tuple[int, ...] | None
"""The HF tensors of a weight that are adapted, each by an adapter of its own; None: the whole
weight by one adapter, whose A all its tensors share.
"""


@dataclass(frozen=True)
class AdapterSpec:
    """What adapters are besides their tensors."""

    rank: int
    alpha: float
    dropout: float
    model: str
    """The name of the model that they adapt."""
    base: str
    """The digest of that model's weights, see `base_digest`."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its config.json that were overridden."""

    def peft_config(self, names: Iterable[str]) -> dict[str, Any]:
        """The fields of PEFT's config for adapters whose tensors have these names."""
        whole = self.alpha == int(self.alpha)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.model,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if whole else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": sorted(module for name in names if (module := adapted_by(name))),
            "inference_mode": True,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
        }

    def identity(self, table: Table) -> dict[str, Any]:
        """What has to agree for values of the adapters of `table` to mean the same: their base,
        rank and scale, and a digest of the modules they adapt.
        """
        names = "\n".join([*table.hf_shapes(), *sorted(table.copies())])
        modules = hashlib.sha256(names.encode()).hexdigest()[:32]
        return {"base": self.base, "dim": self.rank, "alpha": self.alpha, "modules": modules}


def adapted_by(name: str) -> str:
    """The module that the A of this name adapts, by its whole path; "" for other tensors."""
    is_a = name.startswith(PREFIX) and name.endswith(A)
    return name.removeprefix(PREFIX).removesuffix(A) if is_a else ""


@dataclass(frozen=True)
class Concatenated(RowBase):
    """Replicated; HF tensors of the same dimensions one below another."""

    dims: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),) * len(self.hf)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = arch.shape(self.dims)
        return (rows * len(self.hf), *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = arch.shape(self.dims), self.local_shape(arch, size)
        return tuple(
            Block(part, shape, ALL, local, (nth(part, shape[0]),)) for part in range(len(self.hf))
        )


@dataclass(frozen=True)
class QkvParts(RowBase):
    """Some parts of a fused attention input: for each group, the heads of each part."""

    parts: tuple[int, ...]
    tail: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        sizes = (arch.query_size, arch.kv_size, arch.kv_size)
        return tuple((sizes[part], *arch.shape(self.tail)) for part in self.parts)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        groups = even(arch.num_query_groups, size, self)
        return (groups * sum(self._heads(arch)) * arch.kv_channels, *arch.shape(self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        groups, head, tail = arch.num_query_groups, arch.kv_channels, arch.shape(self.tail)
        mine, heads = even(groups, size, self), self._heads(arch)
        fused = (mine, sum(heads), head, *tail)
        ends = [sum(heads[: n + 1]) for n in range(len(heads))]
        return tuple(
            Block(
                n,
                (groups, own, head, *tail),
                (nth(rank, mine),),
                fused,
                (*ALL, slice(end - own, end)),
            )
            for n, (own, end) in enumerate(zip(heads, ends, strict=True))
        )

    def _heads(self, arch: Architecture) -> tuple[int, ...]:
        all_parts = (arch.heads_per_group, 1, 1)
        return tuple(all_parts[part] for part in self.parts)


def is_adaptable(entry: Entry) -> bool:
    """Whether it is the weight of a decoder layer's linear layer. Those of experts that HF stacks
    are not: their adapters have other shapes in PEFT.
    """
    return (
        entry.where == LAYER
        and entry.row.role is Role.MATRIX
        and entry.megatron.endswith(WEIGHT)
        and _ROUTER not in entry.megatron
        and _of(entry.row) is not None
    )


def adapter_table(table: Table, rank: int, chosen: Mapping[str, Parts]) -> Table:
    """The table of the adapters of `rank` on the weights whose Megatron names are in `chosen`."""
    ignored: dict[str, Ignore] = {}
    entries: list[Entry] = []
    for entry in table.entries:
        if entry.megatron in chosen:
            entries += _entries(entry, chosen[entry.megatron], rank, ignored)
    return replace(table, entries=tuple(entries), ignored=ignored)


def adapters_on(
    table: Table, rank: int, modules: Collection[str], is_joined: Callable[[Entry], bool]
) -> Table:
    """The table of adapters on modules, by their paths in Hugging Face. Those of all modules of a
    fused layer are one adapter if `is_joined` says so of its weight.

    ConversionError for a module that adapters cannot be on.
    """
    chosen: dict[str, Parts] = {}
    left = dict.fromkeys(modules)
    for entry in filter(is_adaptable, table.entries):
        names = [module_of(name) for name in entry.hf]
        parts = tuple(number for number, name in enumerate(names) if name in left)
        whole = len(parts) == len(names) and (len(names) == 1 or is_joined(entry))
        if parts:
            chosen[entry.megatron] = None if whole else parts
        for number in parts:
            del left[names[number]]
    if left:
        shown = ", ".join(list(left)[:_SHOWN])
        raise ConversionError(
            f"no linear layer of this {table.family} model that can be adapted is called "
            f"{shown}{' and others' * (len(left) > _SHOWN)}"
        )
    return adapter_table(table, rank, chosen)


def a_of(weight: str) -> str:
    """The name of the A that adapts the Megatron parameter `weight`."""
    return module_of(weight) + _IN


def b_of(weight: str) -> str:
    """The name of the B that adapts the Megatron parameter `weight`."""
    return module_of(weight) + _OUT


def joined(table: Table, adapters: Table | None) -> Table:
    """The model's table with the entries of its adapters, if there are any."""
    own = () if adapters is None else adapters.entries
    return replace(table, entries=(*table.entries, *own)) if own else table


def outputs(row: Row, arch: Architecture, rank: int, size: int) -> Tensor:
    """The outputs that shard `rank` of `size` of a fused layer's weight or B has: int64 `[O, 2]`,
    for each the number of its HF tensor and of its row there.
    """
    assert isinstance(row, Qkv | QkvParts | GateUp | Columns), type(row)
    narrow: Row = replace(row, dims=(row.dims[0], 1)) if isinstance(row, GateUp | Columns) else row
    if isinstance(row, Qkv | QkvParts):
        narrow = replace(row, tail=(1,))
    shapes = narrow.hf_shapes(arch)
    numbers = [torch.full(shape, part) for part, shape in enumerate(shapes)]
    rows = [torch.arange(shape[0]).unsqueeze(1) for shape in shapes]
    found = []
    for parts in (numbers, rows):
        own = torch.empty(narrow.local_shape(arch, size), dtype=torch.int64)
        fill_shard(narrow, arch, own, parts, rank, size)
        found.append(own)
    return torch.cat(found, 1)


def module_of(name: str) -> str:
    """The name of the module whose weight has this name."""
    return name.removesuffix(WEIGHT)


def _entries(entry: Entry, parts: Parts, rank: int, ignored: dict[str, Ignore]) -> Iterator[Entry]:
    into, out = _rows(entry.row, parts, rank)
    numbers = range(len(entry.hf)) if parts is None else parts
    modules = [PREFIX + module_of(entry.hf[number]) for number in numbers]
    first, *others = (module + A for module in modules)
    if parts is None:
        for name in others:
            why = "the adapter of the fused layer has one A for all its tensors"
            ignored[name] = Ignore(name, why, equals=first, carried=True)
        others = []
    for row, side, hf in (
        (into, _IN, (first, *others)),
        (out, _OUT, tuple(module + B for module in modules)),
    ):
        name = module_of(entry.megatron) + side
        yield replace(entry, megatron=name, hf=hf, row=row, adapts=entry.megatron)


def _of(row: Row) -> Qkv | GateUp | Columns | Rows | Whole | None:
    """The row, or the one of which it joins the tensors, if adapters can follow it."""
    of = row.of if isinstance(row, Joined) else row
    return of if isinstance(of, Qkv | GateUp | Columns | Rows | Whole) else None


def _rows(row: Row, parts: Parts, rank: int) -> tuple[Row, Row]:
    """The rows of A and B."""
    of = _of(row)
    assert of is not None, f"{row.megatron} is not adaptable"
    into, out = (module_of(row.megatron) + side for side in (_IN, _OUT))
    numbers = tuple(range(len(row.hf))) if parts is None else parts
    modules = [PREFIX + module_of(row.hf[number]) for number in numbers]
    hf_a, hf_b = (tuple(module + side for module in modules) for side in (A, B))
    if isinstance(of, Rows):
        outputs, inputs = of.dims
        return Rows(into, hf_a, (rank, inputs)), Whole(out, hf_b, (outputs, rank))
    if isinstance(of, Columns | Whole):
        outputs, inputs = of.dims
        return Whole(into, hf_a, (rank, inputs)), type(of)(out, hf_b, (outputs, rank))
    (inputs,) = of.tail if isinstance(of, Qkv) else of.dims[1:]
    a: Row = Whole(into, hf_a[:1], (rank, inputs))
    if parts is not None:
        a = Concatenated(into, hf_a, (rank, inputs))
    if parts is None or len(parts) == len(row.hf):
        b: Row = _with_inputs(of, out, hf_b, rank)
        return a, (
            Joined((hf_b[0],), _with_inputs(of, out, (), rank)) if isinstance(row, Joined) else b
        )
    return a, _some_outputs(of, out, hf_b, parts, rank)


def _with_inputs(of: Qkv | GateUp, name: str, hf: tuple[str, ...], rank: int) -> Qkv | GateUp:
    if isinstance(of, Qkv):
        return Qkv(name, hf, (rank,))
    return GateUp(name, hf, (of.dims[0], rank))


def _some_outputs(
    of: Qkv | GateUp, name: str, hf: tuple[str, ...], parts: tuple[int, ...], rank: int
) -> Row:
    if isinstance(of, GateUp):
        return Columns(name, hf, (of.dims[0], rank))
    return QkvParts(name, hf, parts, (rank,))
