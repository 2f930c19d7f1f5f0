"""Chooses the weights that adapters adapt: the modules that `megatron_cfg.peft` names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
    strip_weight,
)
from megatron_policy.config.model_table import bind_model, check_reference
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.beyond_te import beyond_transformer_engine
from megatron_policy.converters.rows import GateUp, Joined, Qkv
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import ConfigError

_KEY = "policy.megatron_cfg.peft"
_SPLIT: dict[type, tuple[str, ...]] = {
    Qkv: ("linear_q", "linear_k", "linear_v"),
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
    chosen = _choose(entries, peft.target_modules, peft.exclude_modules)
    _refuse_single_experts(entries, chosen)
    if not chosen:
        raise ConfigError(f"{_KEY}.exclude_modules leaves no module to adapt: name fewer")
    most = max(_find_highest_rank(entry, table) for entry in entries if entry.megatron in chosen)
    if peft.dim > most:
        raise ConfigError(
            f"{_KEY}.dim is {peft.dim}, but no weight that is adapted has a rank above {most}: set "
            "it to that or less"
        )
    return build_adapter_table(table, peft.dim, chosen)


def _find_highest_rank(entry: Entry, table: Table) -> int:
    """The highest rank that the weight can have; of fused layers, of all parts together."""
    shapes = entry.row.hf_shapes(table.architecture)
    return min(sum(shape[-2] for shape in shapes), max(shape[-1] for shape in shapes))


def _refuse_single_experts(entries: Iterable[Entry], chosen: Container[str]) -> None:
    """ConfigError if only some experts of a tensor that HF has for all of them are adapted."""
    stacks: dict[tuple[str, ...], set[bool]] = defaultdict(set)
    for entry in filter(is_stacked, entries):
        stacks[entry.hf].add(entry.megatron in chosen)
        if len(stacks[entry.hf]) > 1:
            raise ConfigError(
                f"{_KEY}: the experts of {entry.hf[0]} are in one tensor, whose adapter has all of "
                "them: put * where the expert's number is, or name that tensor"
            )


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
    ParamGroups.of(settings).check(trained)
    return table, trained


def add_adapters(config: PolicyConfig, table: Table) -> Table:
    """The table of a model with the adapters that `config` asks for, if any."""
    return join_adapters(table, choose_adapters(config, table))


def check_implementation(requested: str, architecture: Architecture, adapted: bool) -> None:
    """ConfigError if Transformer Engine is asked for and cannot express the model."""
    beyond = find_inexpressible(architecture, adapted)
    if requested == "transformer_engine" and beyond:
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl is 'transformer_engine', which cannot express "
            f"this model's {', '.join(beyond)}; use 'auto' or 'local'"
        )


def find_inexpressible(architecture: Architecture, adapted: bool) -> list[str]:
    """What Transformer Engine's modules cannot express of a model, which has adapters if `adapted`:
    its layers apply a norm to what adapters would read, and its experts are one module.
    """
    return [*beyond_transformer_engine(architecture), *(["adapters"] if adapted else [])]


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
        if is_stacked(bases[weight]):
            chosen[weight] = None
            paths.append(bases[weight].hf[0])
            continue
        modules = [find_module(name) for name in sides[name_a(weight)].hf]
        names = [strip_weight(name) for name in bases[weight].hf]
        parts = tuple(map(names.index, modules))
        fused = len(modules) < len(sides[name_b(weight)].hf)
        chosen[weight] = None if fused or len(names) == 1 else parts
        paths += [strip_weight(weight)] if fused else modules
    paths = list(dict.fromkeys(paths))
    words = tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    entries = [entry for entry in table.entries if is_adaptable(entry)]
    return words if _choose(entries, words, ()) == chosen else tuple(paths)


def _choose(
    entries: Iterable[Entry], targets: tuple[str, ...], excluded: tuple[str, ...]
) -> dict[str, Parts]:
    """Which parts of which weights are adapted."""
    found = ((entry.megatron, _choose_parts(entry, targets, excluded)) for entry in entries)
    return {weight: parts for weight, parts in found if parts != ()}


def _choose_parts(entry: Entry, targets: tuple[str, ...], excluded: tuple[str, ...]) -> Parts:
    """Which parts of the weight are adapted; () for none."""
    whole, parts = _name_modules(entry)
    if any(_match(excluded, name) for name in whole):
        return ()
    left = tuple(n for n, names in parts.items() if not any(_match(excluded, x) for x in names))
    fused = not targets or any(_match(targets, name) for name in whole)
    if fused and len(left) == len(parts):
        return None
    found = tuple(n for n in left if fused or any(_match(targets, x) for x in parts[n]))
    return None if found and len(entry.hf) == 1 else found


def _name_modules(entry: Entry) -> tuple[list[str], Mapping[int, list[str]]]:
    """The paths of the weight's module, and of the modules of its parts."""
    whole = strip_weight(entry.megatron)
    row = entry.row
    inner = () if isinstance(row, Joined) else _SPLIT.get(type(row), ())
    parts = {n: [strip_weight(name)] for n, name in enumerate(entry.hf)}
    for n, leaf in enumerate(inner):
        parts[n].append(f"{whole.rpartition('.')[0]}.{leaf}")
    return [whole], parts


def _match(patterns: Iterable[str], path: str) -> bool:
    """Whether one of them names the module: by its whole path, by its end, or as a pattern."""
    return any(
        path == each or path.endswith(f".{each}") or fnmatchcase(path, each) for each in patterns
    )


def _refuse_unknown(key: str, names: Iterable[str], entries: Iterable[Entry], table: Table) -> None:
    paths: dict[str, None] = {}
    for entry in entries:
        whole, parts = _name_modules(entry)
        paths |= dict.fromkeys([*whole, *(path for each in parts.values() for path in each)])
    legal = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    for name in names:
        if not any(_match([name], path) for path in paths):
            raise ConfigError(
                f"{key}: no linear layer of this {table.family} model that can be adapted is "
                f"called {name!r}; legal are {', '.join(legal)}, paths that end in them, and "
                "patterns with *"
            )
