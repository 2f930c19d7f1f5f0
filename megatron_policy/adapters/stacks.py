"""Adapters of experts as PEFT has them, which adapts what transformers has: parameters in which the
experts of a layer are stacked (`target_parameters`).

Of most families PEFT also reads a file with an adapter for each projection of each expert, as
engines do, and stacks them itself. Stacked adapters have those of all experts in one A and one B.
Also which linear layers of towers and projectors adapters can be on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.rows.blocks import Row
from megatron_policy.converters.rows.expert_rows import (
    Stacked,
    StackedAdapterA,
    StackedAdapterB,
)
from megatron_policy.converters.rows.kinds import Columns, GateUp, Rows, Whole
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import ConfigError

PREFIX, WEIGHT = "base_model.model.", ".weight"
"""What PEFT puts before the name of the module that it adapts, and the end of a weight's name."""
INNER = ".base_layer"
"""What PEFT calls a module within the adapter of the second of its parameters."""
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")
_SIDE = re.compile(r"(.+)(\.lora_[AB]\.weight)")
_ENDS = (".experts", ".experts" + INNER)
_IN, _OUT = "gate_up_proj", "down_proj"
_STACKS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), _IN),
    **dict.fromkeys(("down_proj", "w2"), _OUT),
}
"""The projections of gated MLPs, and what transformers calls them where it stacks experts."""


_NOT_APART = ("qwen3_5_moe",)
"""Families with gated experts whose adapters PEFT (0.21) loses in a file that has them apart."""


def has_gates(table: Table) -> bool:
    """Whether experts, if there are any, have gated MLPs."""
    moe = table.architecture.moe
    return moe is None or moe.gated


def is_read_apart(table: Table) -> bool:
    """Whether PEFT reads an adapter for each projection of each expert, if there are any; of
    projections without a gate it does not.
    """
    return has_gates(table) and table.family not in _NOT_APART


def name_stack(module: str, *, gated: bool = True) -> str:
    """The parameter in which transformers stacks the weights of an expert's projection with those
    of the other experts; "" for other modules.
    """
    found = _EXPERT.fullmatch(module)
    if found is None or found[2] not in _STACKS:
        return ""
    path = found[1].replace(".block_sparse_moe.", ".mlp.")
    return f"{path}.{_STACKS[found[2]] if gated else found[2]}"


def stack_adapters(adapters: Table) -> Table:
    """The table of the same adapters, with those of a projection of all experts in one A and one B.

    ConfigError if gate and up projections have adapters apart: stacked, they have one A.
    """
    gated = has_gates(adapters)
    stacks = {name_stack(_split(name)[0], gated=gated) for e in adapters.entries for name in e.hf}
    of_tensors: dict[tuple[str, ...], list[Entry]] = {}
    for entry in adapters.entries:
        module, side = _split(entry.hf[0])
        stack = name_stack(module, gated=gated)
        if stack:
            path, _, leaf = stack.rpartition(".")
            inner = INNER if leaf != _OUT and f"{path}.{_OUT}" in stacks else ""
            name = f"{path}{inner}{side}"
            entry = replace(entry, hf=(name,), row=_stack_row(entry, name))
        of_tensors.setdefault(entry.hf, []).append(entry)
    entries = tuple(entry for same in of_tensors.values() for entry in same)
    ignored = {n: row for n, row in adapters.ignored.items() if not name_stack(_split(n)[0])}
    return replace(adapters, entries=entries, ignored=ignored)


def _split(name: str) -> tuple[str, str]:
    """The module of an adapter, and which of its matrices has this name."""
    found = _SIDE.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def _stack_row(entry: Entry, name: str) -> Row:
    row, expert = entry.row, entry.expert
    assert expert is not None, f"{entry.megatron} is an expert's"
    if isinstance(row, Stacked):
        return row
    if not isinstance(row, GateUp | Columns | Rows | Whole):
        raise ConfigError(
            f"gate and up projections of experts have one A in {name}: name linear_fc1 in "
            "policy.megatron_cfg.peft.target_modules, in place of the two"
        )
    outer, inner = row.dims
    if ".lora_A." in name:
        assert isinstance(outer, int)
        return StackedAdapterA(
            row.megatron, (name,), outer, str(inner), isinstance(row, Rows), expert, part=row.part
        )
    assert isinstance(inner, int) and not isinstance(row, Rows)
    return StackedAdapterB(row.megatron, (name,), row, inner, expert, part=row.part)


def fit_to_peft(config: Mapping[str, Any], adapters: Table) -> dict[str, Any]:
    """The fields of PEFT's config for its own models, from those by the names of tensors: experts
    by the parameters in which transformers stacks them, and all modules of these names so, since
    PEFT takes each module of the name `gate_proj` for that of an expert.

    ConfigError if PEFT cannot stack the adapters.
    """
    moe = adapters.architecture.moe
    if moe is None or not moe.gated:
        return dict(config)
    parameters = {*(config["target_parameters"] or ())}
    modules, stacks = list[str](), dict[str, list[str]]()
    for module in config["target_modules"]:
        if stack := name_stack(module):
            stacks.setdefault(stack, []).append(module)
        elif module.rpartition(".")[2] in _STACKS:
            parameters.add(module + WEIGHT)
        else:
            modules.append(module)
    for stack, found in stacks.items():
        path, _, leaf = stack.rpartition(".")
        wanted = moe.experts * (2 if leaf == _IN else 1)
        if len(found) < wanted:
            raise ConfigError(
                f"PEFT cannot read adapters on {len(found)} of the {wanted} projections that "
                f"{stack} of a {adapters.family} model has, such as {found[0]}: name linear_fc1 "
                "and linear_fc2, of all experts, in policy.megatron_cfg.peft.target_modules; or "
                "take the merged model, with export_hf or refit"
            )
        # PEFT reads the inner of two adapters only, and starts the other with a B of zeros.
        parameters |= {stack, f"{path}.{_OUT}"}
    twice = {f"experts.{_IN}": 2} if any(each.endswith(_IN) for each in stacks) else {}
    return {
        **config,
        "lora_dropout": 0.0 if parameters else config["lora_dropout"],
        "target_modules": modules,
        "target_parameters": sorted(parameters) or None,
        # Gate and up projections have a rank each.
        "rank_pattern": {name: n * config["r"] for name, n in twice.items()},
        "alpha_pattern": {name: n * config["lora_alpha"] for name, n in twice.items()},
    }


def name_modules(
    parameters: Collection[str], tensors: Collection[str]
) -> tuple[set[str], list[str]]:
    """The modules that PEFT adapts by these `target_parameters`, and those of the parameters that
    are left: whose adapters are stacked, in a file with these `tensors`.
    """
    adapted = {_split(name)[0].removeprefix(PREFIX) for name in tensors}
    stacked = {module.removesuffix(INNER) for module in adapted if module.endswith(_ENDS)}
    apart = {module: stack for module in adapted if (stack := name_stack(module))}
    paths = {stack.rpartition(".")[0] for stack in apart.values()}
    modules, left = set[str](), list[str]()
    for name in parameters:
        if name.endswith(WEIGHT):
            modules.add(name.removesuffix(WEIGHT))
            continue
        modules |= {module for module, stack in apart.items() if _is_end(name, [stack])}
        path = name.rpartition(".")[0]
        if _is_end(path, stacked) or not (_is_end(path, paths) or (not path and paths)):
            left.append(name)
    return modules, left


def _is_end(name: str, paths: Collection[str]) -> bool:
    """Whether one of the paths is, or ends in, this name."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


_EMBEDS = re.compile("embed|pos_emb|token")
"""What modules have in their names that look up rows in place of multiplying."""


def is_of_tower(entry: Entry) -> bool:
    """Whether it is of a tower or a projector, or of an adapter there."""
    return entry.megatron.startswith(PARAMETERS)


def is_linear_of_tower(entry: Entry) -> bool:
    """Whether it is the weight of a linear layer there, by its name and shape, in a file that has
    the names of transformers' modules: PEFT goes by these.
    """
    name, row = entry.megatron.removeprefix(PARAMETERS), entry.row
    if not is_of_tower(entry) or not name.endswith(WEIGHT) or not entry.hf[0].endswith(name):
        return False
    module = name.removesuffix(WEIGHT).rpartition(".")[2]
    return type(row) is Whole and len(row.dims) == 2 and not _EMBEDS.search(module)
