"""Low-rank adapters as rows: the parameters that they add to a model, by the names of PEFT.

A linear layer's weight W becomes `W + scale * B A`. Source: Hu et al. 2021, "LoRA"; names and
shapes are those of Hugging Face PEFT. Ranks split A and B as they split W: the outputs of a
column-parallel layer are B's rows, the inputs of a row-parallel one A's columns. Beside adapters a
scalar head is trained in full: PEFT calls such a module one of its `modules_to_save`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_policy.adapters.rows import Concatenated, GatedQkvParts, QkvParts
from megatron_policy.adapters.stacks import (
    INNER,
    has_gates,
    is_linear_of_tower,
    is_read_apart,
    name_stack,
    stack_adapters,
)
from megatron_policy.adapters.stacks import PREFIX as PREFIX
from megatron_policy.adapters.stacks import WEIGHT as WEIGHT
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Role, Row, fill_shard
from megatron_policy.converters.rows.expert_rows import (
    Stacked,
    StackedAdapterA,
    StackedAdapterB,
    StackedGateAboveUp,
    StackedGateUp,
    StackedInputs,
    StackedRows,
)
from megatron_policy.converters.rows.kinds import (
    Columns,
    GateUp,
    Ignore,
    Joined,
    Qkv,
    Rows,
    Whole,
)
from megatron_policy.converters.rows.sections import GatedQkv, Sections
from megatron_policy.converters.scalar_head import TENSORS
from megatron_policy.converters.table import LAYER, Entry, Table
from megatron_policy.errors import ConversionError

_ROUTER = ".mlp.router."
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
    """The digest of that model, see `base_digest`."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its config.json that were overridden."""

    def peft_config(self, table: Table) -> dict[str, Any]:
        """The fields of PEFT's config for the adapters of `table`."""
        whole = self.alpha == int(self.alpha)
        names, parameters = [*table.hf_shapes(), *table.copies()], list_target_parameters(table)
        stacks = {strip_leaf(name) for name in parameters}
        modules = sorted(module for name in names if (module := find_module(name)))
        head = table.architecture.head if PREFIX + TENSORS[0] in names else None
        of_head = "TOKEN_CLS" if head is not None and head.per_token else "SEQ_CLS"
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if head is None else of_head,
            "base_model_name_or_path": self.model,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if whole else self.alpha,
            # Adapters of stacked experts have none in PEFT.
            "lora_dropout": 0.0 if parameters else self.dropout,
            "target_modules": [m for m in modules if unwrap(m) not in stacks],
            "target_parameters": parameters or None,
            "modules_to_save": None if head is None else [strip_leaf(TENSORS[0])],
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
        names = [*table.hf_shapes(), *sorted(table.copies()), *list_target_parameters(table)]
        modules = hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]
        return {"base": self.base, "dim": self.rank, "alpha": self.alpha, "modules": modules}


def is_same_base(stated: object, own: str) -> bool:
    """Whether the digest of a base that a directory states is `own`, of `base_digest`.

    Directories of an earlier release state its first part alone, which is all that is compared.
    """
    return stated in (own, own.partition(".")[0])


def find_module(name: str) -> str:
    """The module that the A of this name adapts, by its whole path; "" for other tensors."""
    is_a = name.startswith(PREFIX) and name.endswith(A)
    return name.removeprefix(PREFIX).removesuffix(A) if is_a else ""


def is_adaptable(entry: Entry) -> bool:
    """Whether it is the weight of a linear layer of the decoder, of a tower or a projector, or of
    an expert.
    """
    return is_linear_of_tower(entry) or (
        entry.where == LAYER
        and entry.row.role is Role.MATRIX
        and entry.megatron.endswith(WEIGHT)
        and _ROUTER not in entry.megatron
        and _unjoin(entry.row) is not None
    )


def build_adapter_table(table: Table, rank: int, chosen: Mapping[str, Parts]) -> Table:
    """The table of the adapters of `rank` on the weights whose Megatron names are in `chosen`, and
    of a scalar head, by PEFT's names.
    """
    entries: list[Entry] = []
    adapted = [entry for entry in table.entries if entry.megatron in chosen]
    stacks = dict.fromkeys(name_parameter(each, table) for each in adapted if is_stacked(each))
    for _, same in groupby(adapted, key=lambda entry: entry.hf):
        pairs = [_make_pair(table, each, chosen[each.megatron], rank, stacks) for each in same]
        entries += [entry for side in zip(*pairs, strict=True) for entry in side]
    why = "the adapter of the fused layer has one A for all its tensors"
    ignored = {
        name: Ignore(name, why, equals=first, carried=True)
        for entry in adapted
        if chosen[entry.megatron] is None
        for first, *others in [[PREFIX + name_module(each, table) + A for each in entry.hf]]
        for name in others
    }
    for entry in table.entries:
        if entry.hf[0] in TENSORS:
            assert isinstance(entry.row, Whole), "a scalar head is on every rank"
            hf = tuple(PREFIX + name for name in entry.hf)
            entries.append(replace(entry, hf=hf, row=replace(entry.row, hf=hf)))
    found = replace(table, entries=tuple(entries), ignored=ignored, fresh={})
    return found if is_read_apart(table) else stack_adapters(found)


def drop_head(adapters: Table) -> Table:
    """The table of the adapters alone, without a scalar head."""
    return replace(adapters, entries=tuple(e for e in adapters.entries if e.adapts))


def bind_adapters(
    table: Table,
    rank: int,
    modules: Collection[str],
    is_joined: Callable[[Entry], bool],
    parameters: Collection[str] = (),
) -> Table:
    """The table of adapters on modules, by their paths in Hugging Face, and on `parameters` with
    stacked experts. Those of all modules of a fused layer are one adapter if `is_joined` says so of
    its weight.

    ConversionError for a module that adapters cannot be on.
    """
    chosen: dict[str, Parts] = {}
    left = dict.fromkeys(modules)
    for entry in filter(is_adaptable, table.entries):
        if parameter := name_parameter(entry, table):
            if parameter in parameters:
                chosen[entry.megatron] = None
            continue
        names = [name_module(name, table) for name in entry.hf]
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
    return build_adapter_table(table, rank, chosen)


def name_a(weight: str) -> str:
    """The name of the A that adapts the Megatron parameter `weight`."""
    return strip_weight(weight) + _IN


def name_b(weight: str) -> str:
    """The name of the B that adapts the Megatron parameter `weight`."""
    return strip_weight(weight) + _OUT


def join_adapters(table: Table, adapters: Table | None) -> Table:
    """The model's table with the entries of its adapters, if there are any."""
    own = () if adapters is None else drop_head(adapters).entries
    return replace(table, entries=(*table.entries, *own)) if own else table


def number_outputs(row: Row, arch: Architecture, rank: int, size: int) -> Tensor:
    """The outputs that shard `rank` of `size` of a fused layer's weight or B has: int64 `[O, 2]`,
    for each the number of its HF tensor and of its row there.
    """
    assert isinstance(row, _Numbered), type(row)
    narrow: Row = (
        replace(row, tail=(1,)) if isinstance(row, _Tailed) else replace(row, dims=(row.dims[0], 1))
    )
    shapes = narrow.hf_shapes(arch)
    numbers = [torch.full(shape, part) for part, shape in enumerate(shapes)]
    rows = [torch.arange(shape[0]).unsqueeze(1) for shape in shapes]
    found = []
    for parts in (numbers, rows):
        own = torch.empty(narrow.local_shape(arch, size), dtype=torch.int64)
        fill_shard(narrow, arch, own, parts, rank, size)
        found.append(own)
    return torch.cat(found, 1)


def strip_weight(name: str) -> str:
    """The name of the module whose weight has this name."""
    return name.removesuffix(WEIGHT)


def name_module(weight: str, table: Table) -> str:
    """The path, in transformers, of the module with the HF tensor of this name: PEFT goes by it."""
    path = strip_weight(weight)
    for saved, own in table.paths:
        if saved.startswith(".") or path.startswith(saved):
            path = path.replace(saved, own, 1)
    return path


def is_stacked(entry: Entry) -> bool:
    """Whether it is, or adapts, an expert's part of a tensor that HF has for all experts."""
    return isinstance(entry.row, Stacked)


def name_parameter(entry: Entry, table: Table) -> str:
    """The parameter of transformers whose adapter is that of this weight, and of those of the other
    experts in it; "" if the weight has one of its own.
    """
    module = name_module(entry.hf[0], table)
    if is_stacked(entry):
        return module
    return "" if is_read_apart(table) else name_stack(module, gated=has_gates(table))


def list_stacked_parameters(table: Table) -> list[str]:
    """The parameters with stacked experts of a model that adapters can be on."""
    names = (name_parameter(entry, table) for entry in table.entries if is_adaptable(entry))
    return [name for name in dict.fromkeys(names) if name]


def strip_leaf(tensor: str) -> str:
    """The module that has a tensor."""
    return tensor.rpartition(".")[0]


def unwrap(module: str) -> str:
    """The module itself, of the path of its adapter: PEFT calls it its `base_layer` within the
    adapter of the second of its tensors.
    """
    return module.partition(INNER)[0]


def list_target_parameters(adapters: Table) -> list[str]:
    """The parameters with stacked experts that these adapters adapt."""
    into = "gate_up_proj" if has_gates(adapters) else "up_proj"
    leaves = {"linear_fc1": into, "linear_fc2": "down_proj"}
    stacked = (entry for entry in adapters.entries if isinstance(entry.row, StackedAdapterA))
    named = ((find_module(e.hf[0]), strip_weight(e.adapts).rpartition(".")[2]) for e in stacked)
    return sorted({f"{unwrap(module)}.{leaves[layer]}" for module, layer in named})


def _make_pair(
    table: Table, entry: Entry, parts: Parts, rank: int, stacks: Iterable[str]
) -> tuple[Entry, Entry]:
    """The entries of A and B. PEFT wraps a module once for each of its tensors that is adapted; of
    all such `stacks`, which are in the module's order, the first is innermost.
    """
    numbers = range(len(entry.hf)) if parts is None else parts
    modules = [PREFIX + name_module(entry.hf[number], table) for number in numbers]
    if is_stacked(entry):
        parameter = name_parameter(entry, table)
        path = strip_leaf(parameter)
        siblings = [name for name in stacks if strip_leaf(name) == path]
        modules = [PREFIX + path + (len(siblings) - 1 - siblings.index(parameter)) * INNER]
        rows = _make_stacked_rows(entry.row, modules[0], rank)
    else:
        rows = _make_rows(table, entry.row, parts, rank)
    into, out = (
        replace(
            entry,
            megatron=strip_weight(entry.megatron) + side,
            hf=tuple(module + name for module in modules[: len(row.hf)]),
            row=row,
            adapts=entry.megatron,
        )
        for row, side, name in zip(rows, (_IN, _OUT), (A, B), strict=True)
    )
    return into, out


def _make_stacked_rows(row: Row, module: str, rank: int) -> tuple[Row, Row]:
    """The rows of A and B of an expert's part of a tensor that HF has for all experts."""
    assert isinstance(row, _Stacks), f"{row.megatron} is not adaptable"
    split = isinstance(row, StackedRows | StackedInputs)
    inputs = row.dims[1] if isinstance(row, StackedRows | StackedInputs) else row.tail[0]
    into, out = (strip_weight(row.megatron) + side for side in (_IN, _OUT))
    return (
        StackedAdapterA(into, (module + A,), rank, inputs, split, row.expert),
        StackedAdapterB(out, (module + B,), row, rank, row.expert),
    )


_Tailed = Qkv | QkvParts | GatedQkv | GatedQkvParts | Sections
_Numbered = _Tailed | GateUp | Columns
_Plain = Qkv | GatedQkv | Sections | GateUp | Columns | Rows | Whole
_Stacks = StackedGateUp | StackedRows | StackedGateAboveUp | StackedInputs
_Adaptable = _Plain | _Stacks


def _unjoin(row: Row) -> _Adaptable | None:
    """The row, or the one of which it joins the tensors, if adapters can follow it."""
    of = row.of if isinstance(row, Joined) else row
    return of if isinstance(of, _Adaptable) else None


def _make_rows(table: Table, row: Row, parts: Parts, rank: int) -> tuple[Row, Row]:
    """The rows of A and B."""
    of = _unjoin(row)
    assert isinstance(of, _Plain), f"{row.megatron} is not adaptable"
    into, out = (strip_weight(row.megatron) + side for side in (_IN, _OUT))
    numbers = tuple(range(len(row.hf))) if parts is None else parts
    modules = [PREFIX + name_module(row.hf[number], table) for number in numbers]
    hf_a, hf_b = (tuple(module + side for module in modules) for side in (A, B))
    kind = of.part
    if isinstance(of, Rows):
        outputs, inputs = of.dims
        a: Row = Rows(into, hf_a, (rank, inputs), part=kind)
        return a, Whole(out, hf_b, (outputs, rank), part=kind)
    if isinstance(of, Columns | Whole):
        outputs, inputs = of.dims
        a = Whole(into, hf_a, (rank, inputs), part=kind)
        return a, type(of)(out, hf_b, (outputs, rank), part=kind)
    (inputs,) = of.dims[1:] if isinstance(of, GateUp) else of.tail
    if parts is None:
        a = Whole(into, hf_a[:1], (rank, inputs), part=kind)
    else:
        a = Concatenated(into, hf_a, (rank, inputs), part=kind)
    if isinstance(of, Sections):
        own = tuple(of.sections[number] for number in numbers)
        return a, Sections(out, hf_b, own, (rank,), by=of.by, part=kind)
    if len(numbers) < len(row.hf):
        if isinstance(of, GatedQkv):
            return a, GatedQkvParts(out, hf_b, numbers, (rank,))
        if isinstance(of, Qkv):
            return a, QkvParts(out, hf_b, numbers, (rank,))
        return a, Columns(out, hf_b, (of.dims[0], rank), part=kind)
    joins = isinstance(row, Joined)
    hf = () if joins else hf_b
    if isinstance(of, GatedQkv):
        return a, GatedQkv(out, hf, (rank,))
    b: Qkv | GateUp = Qkv(out, hf, (rank,))
    if isinstance(of, GateUp):
        b = GateUp(out, hf, (of.dims[0], rank), part=kind)
    return a, (Joined((hf_b[0],), b) if joins else b)
