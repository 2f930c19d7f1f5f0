"""verl's sections of an engine as plain mappings: which of their keys have an effect, and what verl
calls the keys of a policy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Applied, Ignored, Rejected, asks_for_nothing
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.keys import SAME_AS, SECTIONS, rule_of
from megatron_policy.hosts.verl.megatron_fields import Accepted

_NESTED = ("lora", "mtp", "qat", "router_replay", "override_config", "policy")
_PATH = re.compile(r"\bpolicy\.(\w+(?:\.\w+)*)")
_OF_POLICY = "engine.policy."
"""The section for keys of a policy that verl has no name for."""
_HF_CONFIG = "hf_config_overrides"
_LIMITED = "optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype"
_NAMES = {
    ours: prefix + name
    for prefix, rules in SECTIONS.items()
    for name, rule in rules.items()
    if isinstance(rule, Accepted)
    for ours in rule.sets.replace("*", name).split()
} | {
    "megatron_cfg.optimizer_offload": "engine.optimizer_offload",
    # Accepted with some values only.
    "megatron_cfg.scheduler.lr_decay_style": "optim.lr_decay_style",
    **{f"megatron_cfg.optimizer.{name}": f"optim.{name}" for name in _LIMITED.split()},
}
"""verl's names of the policy's keys that it sets."""


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
    return {
        str(name): plain(value)
        if isinstance(value, Mapping)
        or (is_dataclass(value) and name in _NESTED)
        or (value is None and (name in _NESTED or str(name).startswith("override_")))
        else value
        for name, value in pairs
        if not str(name).startswith("_")
    }


def check_keys(sections: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Warnings about keys that ask for what is not done, though results are the same without.

    ConfigError lists every key that is unknown, or would change results or memory.
    """
    problems: list[str] = []
    warnings: list[str] = []
    for prefix, section in _walk(sections):
        for name, value in section.items():
            rule = rule_of(prefix, name)
            if rule is None:
                problems.append(_unknown(prefix, name))
            elif isinstance(rule, Rejected) and not _is_harmless(rule, value, sections):
                problems.append(
                    f"{prefix}{name}={value!r:.60} would change {rule.changes} and is not "
                    f"supported: {rule.why}"
                )
            elif isinstance(rule, Ignored) and rule.warned and not asks_for_nothing(value):
                warnings.append(f"{prefix}{name} is ignored: {rule.why}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(warnings)


def same_names(section: Mapping[str, Any], prefix: str, target: str) -> dict[str, Any]:
    """The values of verl's keys that the section `target` of a policy has by the same names."""
    return {
        name: value
        for name, value in section.items()
        if value is not None
        and isinstance(rule := SECTIONS[prefix].get(name), Accepted)
        and f"{target}*" in rule.sets.split()
    }


def overrides(section: Mapping[str, Any], prefix: str, name: str) -> dict[str, Any]:
    """The keys of overrides that have an effect."""
    path = f"{prefix}{name}."
    return {
        key: value
        for key, value in (section.get(name) or {}).items()
        if isinstance(rule_of(path, key), Applied) and value is not None
    }


@contextmanager
def with_verl_names() -> Iterator[None]:
    """Add verl's names of the policy's keys to the message of a ConfigError of this context."""
    try:
        yield
    except ConfigError as error:
        paths = [p for p in _PATH.findall(str(error)) if p in KEYS or p.startswith(_HF_CONFIG)]
        if not paths:
            raise
        places = ", ".join(
            f"policy.{path} is {name_in_verl(path)}" for path in dict.fromkeys(paths)
        )
        raise ConfigError(f"{error}\nIn verl's configuration, {places}") from error


def name_in_verl(path: str) -> str:
    """The key of verl's configuration that sets the one at this path below `policy`."""
    if path in _NAMES:
        return _NAMES[path]
    if path.startswith(f"{_HF_CONFIG}."):
        return "model.override_config." + path.removeprefix(f"{_HF_CONFIG}.")
    for theirs, ours in SAME_AS.items():
        name = path.removeprefix(ours)
        if name == path or "." in name:
            continue
        rule = rule_of(theirs, name)
        if isinstance(rule, Applied) or (isinstance(rule, Rejected) and rule.only):
            return theirs + name
    return _OF_POLICY + path


def _walk(
    sections: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for prefix, section in sections.items():
        yield prefix, section
        for path in SECTIONS:
            name = path.removeprefix(prefix).rstrip(".")
            if path != prefix and path.startswith(prefix) and section.get(name):
                yield path, section[name]


def _is_harmless(rule: Rejected, value: Any, sections: Mapping[str, Mapping[str, Any]]) -> bool:
    if rule.same_as:
        section, _, name = rule.same_as.rpartition(".")
        return value is None or value == sections[f"{section}."].get(name)
    return asks_for_nothing(value) or value in rule.only


def _unknown(prefix: str, name: str) -> str:
    """Suggest the nearest key of the section."""
    names = [*SECTIONS[prefix]]
    if shared := SAME_AS.get(prefix):
        names += [k.removeprefix(shared) for k in KEYS if k.startswith(shared)]
        names = [each for each in names if "." not in each and rule_of(prefix, each)]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{prefix}{name} is unknown to this engine: {hint}leave it out"
