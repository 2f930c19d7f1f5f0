"""Chooses the weights that adapters adapt: the modules that `megatron_cfg.peft` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain, groupby
from typing import Any

from megatron_policy.adapters.stacks import is_of_tower
from megatron_policy.adapters.table import (
    AdapterSpec,
    Parts,
    build_adapter_table,
    drop_head,
    find_module,
    is_adaptable,
    is_stacked,
    join_adapters,
    name_a,
    name_b,
    name_module,
    name_parameter,
    strip_weight,
)
from megatron_policy.config.model_table import bind_model, check_implementation, check_reference
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.converters.rows import GatedQkv, GateUp, Joined, Qkv
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import ConfigError

_KEY = "policy.megatron_cfg.peft"
_QKV = ("linear_q", "linear_k", "linear_v")
_SPLIT: dict[type, tuple[str, ...]] = {
    Qkv: _QKV,
    GatedQkv: _QKV,
    GateUp: ("linear_fc1_gate", "linear_fc1_up"),
}
"""What Megatron-Bridge calls the parts of a fused layer."""


def choose_adapters(config: PolicyConfig, table: Table) -> Table | None:
    """The table of the adapters that `config` asks for on the model of `table`; None without any.

    ConfigError for a module that the model does not have, or whose parts cannot be adapted so.
    """
    peft = config.megatron_cfg.peft
    if not peft.enabled:
        return None
    assert peft.dim is not None, "checked with the other keys"
    entries = [entry for entry in table.entries if is_adaptable(entry)]
    for key, names in (
        ("target_modules", peft.target_modules),
        ("exclude_modules", peft.exclude_modules),
    ):
        _refuse_unknown(f"{_KEY}.{key}", names, entries, table)
    known = [each for each in entries if peft.target_modules or not is_of_tower(each)]
    chosen = _choose(table, known, peft.target_modules, peft.exclude_modules)
    for parameter, experts in groupby(entries, key=lambda entry: name_parameter(entry, table)):
        if parameter and len({entry.megatron in chosen for entry in experts}) > 1:
            raise ConfigError(
                f"{_KEY}: the experts of {parameter} are in one tensor, whose adapter has all of "
                "them: put * where the expert's number is, or name that tensor"
            )
    if not chosen:
        raise ConfigError(f"{_KEY}.exclude_modules leaves no module to adapt: name fewer")
    # Of a fused layer, all parts have it together.
    shapes = [
        entry.row.hf_shapes(table.architecture) for entry in entries if entry.megatron in chosen
    ]
    most = max(min(sum(o for *_, o, _ in each), max(i for *_, i in each)) for each in shapes)
    if peft.dim > most:
        raise ConfigError(
            f"{_KEY}.dim is {peft.dim}, but no weight that is adapted has a rank above {most}: set "
            "it to that or less"
        )
    return build_adapter_table(table, peft.dim, chosen)


def make_spec(config: PolicyConfig, base: str, overrides: Mapping[str, Any]) -> AdapterSpec:
    """What `config` says of its adapters; `base` is the digest of its model with `overrides`."""
    peft = config.megatron_cfg.peft
    assert peft.dim is not None and peft.alpha is not None, "checked with the other keys"
    return AdapterSpec(peft.dim, peft.alpha, peft.dropout, config.model_name, base, overrides)


def bind_tables(config: PolicyConfig, *, reference: bool = True) -> tuple[Table, Table]:
    """The table of the model that a configuration names, and that of what is trained: the same, or
    with its adapters.

    ConfigError for whatever does not fit this model, however many ranks there are; also for a
    reference that does not, or that is named without being wanted (`reference`).
    """
    table = bind_model(config)
    check_reference(config, table, wanted=reference)
    settings = config.megatron_cfg
    if engine_of(config) is Engine.MEGATRON_CORE:
        check_implementation(settings.transformer_impl, table.architecture, settings.peft.enabled)
    trained = add_adapters(config, table)
    ParamGroups.of_policy(config).check(trained)
    return table, trained


def add_adapters(config: PolicyConfig, table: Table) -> Table:
    """The table of a model with the adapters that `config` asks for, if any."""
    return join_adapters(table, choose_adapters(config, table))


def name_targets(adapters: Table, table: Table) -> tuple[str, ...]:
    """Names for `target_modules` that choose just these adapters on the model of `table`: their
    last words, or their paths if the words name others too.
    """
    adapters = drop_head(adapters)
    sides = {entry.megatron: entry for entry in adapters.entries}
    paths: list[str] = []
    chosen: dict[str, Parts] = {}
    bases = {entry.megatron: entry for entry in table.entries}
    for weight in dict.fromkeys(entry.adapts for entry in adapters.entries):
        if is_stacked(sides[name_a(weight)]):
            chosen[weight] = None
            paths.append(name_parameter(bases[weight], table))
            continue
        modules = [find_module(name) for name in sides[name_a(weight)].hf]
        names = [name_module(name, table) for name in bases[weight].hf]
        parts = tuple(map(names.index, modules))
        fused = len(modules) < len(sides[name_b(weight)].hf)
        chosen[weight] = None if fused or len(names) == 1 else parts
        paths += [strip_weight(weight)] if fused else modules
    paths = list(dict.fromkeys(paths))
    words = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    entries = [entry for entry in table.entries if is_adaptable(entry)]
    return words if _choose(table, entries, words, ()) == chosen else tuple(paths)


def _choose(
    table: Table, entries: Iterable[Entry], targets: tuple[str, ...], excluded: tuple[str, ...]
) -> dict[str, Parts]:
    """Which parts of which weights are adapted."""
    found = ((entry.megatron, _choose_parts(table, entry, targets, excluded)) for entry in entries)
    return {weight: parts for weight, parts in found if parts != ()}


def _choose_parts(
    table: Table, entry: Entry, targets: tuple[str, ...], excluded: tuple[str, ...]
) -> Parts:
    """Which parts of the weight are adapted; () for none."""
    wholes, parts = _name_modules(table, entry)
    if _match(excluded, *wholes):
        return ()
    left = tuple(n for n, names in enumerate(parts) if not _match(excluded, *names))
    fused = not targets or _match(targets, *wholes)
    if fused and len(left) == len(parts):
        return None
    found = tuple(n for n in left if fused or _match(targets, *parts[n]))
    return None if found and len(entry.hf) == 1 else found


def _name_modules(table: Table, entry: Entry) -> tuple[list[str], list[list[str]]]:
    """The paths of the weight's module, and those of the module of each of its parts."""
    whole = strip_weight(entry.megatron)
    parts = [[name_module(name, table)] for name in entry.hf]
    if not isinstance(entry.row, Joined):
        for part, leaf in zip(parts, _SPLIT.get(type(entry.row), ()), strict=False):
            part.append(f"{whole.rpartition('.')[0]}.{leaf}")
    parameter = name_parameter(entry, table)
    return [whole, *([parameter] if parameter else [])], parts


def _match(patterns: Iterable[str], *paths: str) -> bool:
    """Whether one of the patterns names one of the modules: by its whole path, by its end, or as a
    pattern.
    """
    return any(
        path == each or path.endswith(f".{each}") or fnmatchcase(path, each)
        for each in patterns
        for path in paths
    )


def _refuse_unknown(key: str, names: Iterable[str], entries: Iterable[Entry], table: Table) -> None:
    paths: dict[str, None] = {}
    for entry in entries:
        wholes, parts = _name_modules(table, entry)
        paths |= dict.fromkeys([*wholes, *chain.from_iterable(parts)])
    legal = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    for name in names:
        if not _match([name], *paths):
            raise ConfigError(
                f"{key}: no linear layer of this {table.family} model that can be adapted is "
                f"called {name!r}; legal are {', '.join(legal)}, paths that end in them, and "
                "patterns with *"
            )
