"""verl's sections of an engine as plain mappings, and which of their keys have an effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Applied, Ignored, Rejected, asks_for_nothing
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.keys import SAME_AS, SECTIONS, rule_of


def plain(section: Any) -> dict[str, Any]:
    """A section's keys and values, with nested sections as dicts; empty for None."""
    if section is None:
        return {}
    if is_dataclass(section):
        pairs = [(each.name, getattr(section, each.name)) for each in fields(section)]
    elif isinstance(section, Mapping):
        pairs = list(section.items())
    else:
        raise ConfigError(f"a section of verl's configuration is a {type(section).__name__}")
    nested = ("lora", "mtp", "qat", "router_replay", "override_config", "policy")
    return {
        str(name): plain(value)
        if isinstance(value, Mapping)
        or (is_dataclass(value) and name in nested)
        or (value is None and (name in nested or str(name).startswith("override_")))
        else value
        for name, value in pairs
        if not str(name).startswith("_")
    }


def checked(sections: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """What is refused, and what is not done but harmless."""
    problems: list[str] = []
    warnings: list[str] = []
    for prefix, section in _walk(sections):
        for name, value in section.items():
            rule = rule_of(prefix, name)
            if rule is None:
                problems.append(_unknown(prefix, name))
            elif isinstance(rule, Rejected) and not _harmless(rule, value, sections):
                problems.append(
                    f"{prefix}{name}={value!r:.60} would change {rule.changes} and is not "
                    f"supported: {rule.why}"
                )
            elif isinstance(rule, Ignored) and rule.warned and not asks_for_nothing(value):
                warnings.append(f"{prefix}{name} is ignored: {rule.why}")
    return problems, warnings


def applied(section: Mapping[str, Any], prefix: str, name: str) -> dict[str, Any]:
    """The keys of overrides that have an effect."""
    path = f"{prefix}{name}."
    return {
        key: value
        for key, value in (section.get(name) or {}).items()
        if isinstance(rule_of(path, key), Applied) and value is not None
    }


def _walk(
    sections: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for prefix, section in sections.items():
        yield prefix, section
        for path in SECTIONS:
            name = path.removeprefix(prefix).rstrip(".")
            if path != prefix and path.startswith(prefix) and section.get(name):
                yield path, section[name]


def _harmless(rule: Rejected, value: Any, sections: Mapping[str, Mapping[str, Any]]) -> bool:
    if rule.same_as:
        section, _, name = rule.same_as.rpartition(".")
        return value is None or value == sections[f"{section}."].get(name)
    return asks_for_nothing(value) or value in rule.only


def _unknown(prefix: str, name: str) -> str:
    """Suggest the nearest key of the section."""
    shared = SAME_AS.get(prefix)
    names = [*SECTIONS[prefix]]
    if shared:
        names += [k.removeprefix(shared) for k in KEYS if k.startswith(shared)]
        names = [each for each in names if "." not in each and rule_of(prefix, each)]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{prefix}{name} is unknown to this engine: {hint}leave it out"
