"""How a family's table reads a checkpoint: every weight and every config field.

Works on inventories of names, shapes and dtypes; opens no files and reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.plain_values import flatten
from megatron_policy.converters.config_fields import (
    IGNORED,
    IGNORED_FIELD,
    REFUSED,
    TRANSLATED,
    Fields,
    FieldUse,
    shown,
)
from megatron_policy.converters.families.shared.pictures import PARAMETERS, PART, TENSORS, UNREAD
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.rows.shards import split_dimension, unpadded_shape
from megatron_policy.errors import ConversionError

from .registry import family_of
from .table import WEIGHT_DTYPES, Entry, Table, draft

# The architecture's name for a config field, where it differs.
_STANDS_FOR = {
    "attention_bias": "qkv_bias",
    "attention_multiplier": "attention_scale",
    "attn_logit_softcapping": "attention_softcap",
    "embedding_multiplier": "embedding_scale",
    "final_logit_softcapping": "logit_softcap",
    "head_dim": "kv_channels",
    "hidden_act": "activation",
    "hidden_activation": "activation",
    "intermediate_size": "ffn_hidden_size",
    "layer_norm_eps": "layernorm_epsilon",
    "layer_types": "windowed",
    "moe_intermediate_size": "moe.ffn_hidden_size",
    "n_group": "moe.groups",
    "n_routed_experts": "moe.experts",
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "moe.experts",
    "num_experts_per_tok": "moe.chosen",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "num_local_experts": "moe.experts",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_parameters.rope_theta": "rope.base",
    "rope_theta": "rope.base",
    "routed_scaling_factor": "moe.scale",
    "sliding_window": "window",
    "tie_word_embeddings": "tied",
    "topk_group": "moe.groups_chosen",
}
_PARTS = ("", "mla.", "moe.", "rope.scaling.")
_NUMBER = re.compile(r"\.(\d+)\.")
"""Of a module, in the name of a tower's parameter."""


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter, or several alike of one row, whose names are templates in {layer} and
    {expert}; `layers` and `experts` are the numbers these stand for.

    `shape` is that of the whole parameter without its `padding` rows, `split` how tensor-parallel
    ranks share it. For each HF tensor: name, shape, the dtype `found`, and what is `wrong` or "".
    """

    megatron: str
    shape: Shape
    padding: int
    row: str
    split: str
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    found: tuple[str, ...]
    wrong: tuple[str, ...]
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loose:
    """An HF tensor of the checkpoint that feeds no parameter, and why that is or is not allowed."""

    name: str
    shape: Shape
    dtype: str
    why: str


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its table reads it; `problems` has a text for each mismatch.

    With `config_only` there is no checkpoint: the tensors are those that the config's model has.
    """

    family: str
    weights: tuple[Weight, ...]
    ignored: tuple[Loose, ...]
    unmatched: tuple[Loose, ...]
    fields: tuple[FieldUse, ...]
    problems: tuple[str, ...]
    config_only: bool = False
    fields_of: str = "config.json"
    """The file that the fields are in."""


def inspect_adapters(
    table: Table,
    uses: Iterable[FieldUse],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    file: str,
) -> Inspection:
    """Compare the table of adapters with their tensors; `uses` are the fields of `file`."""
    expected, fields = table.hf_shapes(), tuple(uses)
    shared = [name for name in shapes if name in table.ignored]
    extra = [name for name in shapes if name not in expected and name not in table.ignored]
    refused = [each for each in fields if each.outcome == REFUSED]
    problems = [f"{each.name} = {shown(each.value)}: {each.why}" for each in refused]
    try:
        table.check_hf(shapes, dtypes)
    except ConversionError as error:
        problems.append(str(error))
    return Inspection(
        family=f"{table.family} (adapters)",
        weights=tuple(_weights(table, shapes, dtypes)),
        ignored=_loose(shared, shapes, dtypes, "modules of a fused layer share an A"),
        unmatched=_loose(extra, shapes, dtypes, f"no linear layer of {table.family} has it"),
        fields=fields,
        problems=tuple(problems),
        fields_of=file,
    )


def inspect(
    config: Mapping[str, Any],
    written: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
) -> Inspection:
    """Bind the table to `config` and compare it with the checkpoint's tensors.

    `config` has the defaults of its class, `written` is what the file says. ConversionError only
    if the family cannot be determined; all other mismatches are in the result.
    """
    family = family_of(config.get("model_type", ""))
    fields = Fields(config)
    try:
        table = draft(fields, family, tensors=shapes)
    except ConversionError as error:
        uses = tuple(fields.uses("the translation ended before"))
        loose = _loose(shapes, shapes, dtypes, "what it feeds is unknown without the config")
        return Inspection(family.name, (), (), loose, uses, (str(error),))
    expected, ignored = table.hf_shapes(), [name for name in shapes if name in table.ignored]
    extra = [name for name in shapes if name not in expected and name not in table.ignored]
    problems = []
    for check in (fields.finish, partial(table.check_hf, shapes, dtypes)):
        try:
            check()
        except ConversionError as error:
            problems.append(str(error))
    return Inspection(
        table.family,
        tuple(_weights(table, shapes, dtypes)),
        tuple(Loose(n, shapes[n], _short(dtypes[n]), table.ignored[n].why) for n in ignored),
        _loose(extra, shapes, dtypes, f"no row of {table.family} uses it"),
        tuple(_meanings(fields, written, table.architecture)),
        tuple(problems),
    )


def folded(weights: Iterable[Weight]) -> list[Weight]:
    """The weights, merged where they differ only in the numbers of layer and expert."""
    alike: dict[Weight, list[Weight]] = {}
    for weight in weights:
        alike.setdefault(replace(weight, layers=(), experts=()), []).append(weight)
    return [
        replace(
            same,
            layers=tuple(sorted({number for one in several for number in one.layers})),
            experts=tuple(sorted({number for one in several for number in one.experts})),
        )
        for same, several in alike.items()
    ]


def _weights(
    table: Table, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Weight]:
    arch, numbers = table.architecture, _number_layers(table)
    for entry in table.entries:
        expected, layer = entry.row.hf_shapes(arch), numbers.get(entry.megatron, entry.layer)
        yield Weight(
            megatron=_template(entry.row.megatron, entry, layer, arch),
            shape=unpadded_shape(entry.row, arch),
            padding=entry.row.pad_rows(arch, 0, 1),
            row=type(entry.row).__name__,
            split=_split(entry, arch),
            hf=tuple(_template(name, entry, layer, arch) for name in entry.row.hf),
            hf_shapes=expected,
            found=tuple(_short(dtypes[n]) if n in dtypes else "" for n in entry.hf),
            wrong=tuple(
                _wrong(shapes.get(n), want, dtypes.get(n))
                for n, want in zip(entry.hf, expected, strict=True)
            ),
            layers=() if layer is None else (layer,),
            experts=() if entry.expert is None else (entry.expert,),
        )


def _number_layers(table: Table) -> dict[str, int]:
    """The number of the layer that a tower's parameter is of, by its name. Layers are modules that
    are numbered from 0 on and have the same parameters, unlike those of a projector.
    """
    lists: dict[str, dict[int, dict[str, Shape]]] = {}
    owners: dict[str, tuple[str, int]] = {}
    for name, row in ((entry.megatron, entry.row) for entry in table.entries):
        if name.startswith(PARAMETERS) and (found := _NUMBER.search(name)):
            of_list, number = owners[name] = name[: found.start()], int(found[1])
            own = lists.setdefault(of_list, {}).setdefault(number, {})
            own[name[found.end() :]] = unpadded_shape(row, table.architecture)
    alike = {
        of_list: len(modules) > 1
        and all(modules.get(number) == modules.get(0) for number in range(len(modules)))
        for of_list, modules in lists.items()
    }
    return {name: number for name, (of_list, number) in owners.items() if alike[of_list]}


def _template(name: str, entry: Entry, layer: int | None, arch: Architecture) -> str:
    """A row's name with no other marks than {layer}, or of a layer of a tower, and {expert}."""
    if entry.megatron.startswith(PARAMETERS):
        return name.replace(f".{layer}.", ".{layer}.", 1)
    number = (entry.layer or 0) - arch.num_layers
    return name.replace("{mtp}", str(number)).replace("{predicting}", "{layer}")


def _split(entry: Entry, arch: Architecture) -> str:
    if not entry.row.owns:
        return "split like its original"
    dim = split_dimension(entry.row, arch)
    return "held whole by every rank" if dim is None else f"split along dimension {dim}"


def _wrong(shape: Shape | None, expected: Shape, dtype: torch.dtype | None) -> str:
    if shape is None:
        return "missing"
    if tuple(shape) != tuple(expected):
        return f"is {list(shape)}"
    return "" if dtype in WEIGHT_DTYPES else "of a dtype that cannot be converted"


def _loose(
    names: Iterable[str],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    why: str,
) -> tuple[Loose, ...]:
    return tuple(Loose(name, shapes[name], _short(dtypes[name]), why) for name in names)


def _meanings(fields: Fields, written: Mapping[str, Any], arch: Architecture) -> Iterator[FieldUse]:
    """The fields' uses, with the architecture's name for translated ones.

    Includes fields of the file that its class renames or that have the default of every model.
    """
    handled, flat = set(), flatten(arch)
    for use in fields.uses():
        if use.name in (TENSORS, UNREAD, PART):  # which no file has
            continue
        handled.add(use.name.split(".")[0])
        if use.outcome == TRANSLATED and not use.why:
            use = replace(use, why=_meaning(use, flat))
        yield use
    for name, value in written.items():
        if name not in handled:
            why = IGNORED.get(name, "transformers reads it into other fields, or it is the default")
            yield FieldUse(name, value, IGNORED_FIELD, why)


def _meaning(use: FieldUse, flat: Mapping[str, Any]) -> str:
    """The attribute of the architecture that the field became, with its value if that differs.

    "" if name and value are the same, or if the field is not a single attribute.
    """
    name = use.name.removeprefix("text_config.")
    last = name.rpartition(".")[2]
    for path in (_STANDS_FOR.get(name, ""), *(part + last for part in _PARTS)):
        first, *steps = path.split(".")
        value: Any = flat.get(first)
        for step in steps:
            value = getattr(value, step, None)
        value = getattr(value, "value", value)  # for an enum, its value
        if value not in (None, ()):
            if value == use.value:
                return "" if path == name else path
            return f"{path} = {shown(value)}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
