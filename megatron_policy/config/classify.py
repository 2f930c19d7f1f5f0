"""Sorts the keys of a raw mapping by what becomes of them.

Checks no types, and uses them only to tell whether two keys mean the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_policy.config.keys import KEYS, SECTIONS
from megatron_policy.config.megatron_sections import RECOMPUTE_KEYS, MegatronOptimizerConfig
from megatron_policy.config.section import Ignored, Nested, Rejected, Section, asks_for_nothing
from megatron_policy.config.sections import ENGINES
from megatron_policy.errors import ConfigError

_OWN_ENGINES = (None, "megatron")
_NULL_IS_A_VALUE = ("max_grad_norm", "megatron_cfg.optimizer.clip_grad")
"""Everywhere else null means that the key is not given."""


@dataclass
class Classified:
    """`kept` is for the typed sections, `ignored` has path and reason of keys without effect, and
    `warned` those of them that whoever asks for them should be told of.
    """

    kept: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    warned: dict[str, str] = field(default_factory=dict)


def classify(raw: Mapping[str, Any], root: type[Section]) -> Classified:
    """Split a policy's mapping by what becomes of its keys.

    ConfigError lists every unknown key that `ignore_unknown_keys` does not name, with the nearest
    valid one, and every key set to a value that would change results but is not supported.
    """
    result = Classified()
    whole = _Whole(raw, root)
    problems = [*_walk(whole, raw, root, "", result.kept, result)]
    for path in whole.unknown:
        if path in KEYS:
            problems.append(
                f"policy.ignore_unknown_keys names {path!r}, which is known: it is for keys that "
                "this release does not know; take it out of the list"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    result.ignored |= _idle_keys(raw)
    idle_rates = dict(_other_learning_rates(raw))
    result.ignored |= idle_rates
    result.warned |= idle_rates
    return result


def _idle_keys(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys without effect beside the others of this mapping, and why."""
    chosen, *others = ENGINES
    megatron, fsdp2 = _section_of(raw, chosen), _section_of(raw, "dtensor_cfg")
    alone = (fsdp2.get("tensor_parallel_size") or 1) == 1
    if fsdp2.get("enabled") and fsdp2.get("sequence_parallel") and alone:
        why = "tensor_parallel_size is 1: no rank shares a sequence"
        yield "dtensor_cfg.sequence_parallel", why
    if not megatron.get("enabled"):
        return
    for name in others:
        if _section_of(raw, name).keys() - {"enabled"}:
            why = "affects the engine of this section only, and that of megatron_cfg is enabled"
            yield name, why
    for name in ("optimizer", "scheduler"):
        if raw.get(name):
            why = f"affects the engines of dtensor_cfg and fsdp_cfg only: set megatron_cfg.{name}"
            yield name, why
    if not megatron.get("activation_checkpointing"):
        why = "activation_checkpointing is false: nothing is recomputed"
        for name in filter(megatron.get, RECOMPUTE_KEYS):
            yield f"megatron_cfg.{name}", why


def _other_learning_rates(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Learning rates beside another one that the enabled engine trains with, and which that is."""
    info = MegatronOptimizerConfig.model_fields["lr"]
    megatron = _section_of(raw, "megatron_cfg")
    of_torch, common = "optimizer.kwargs.lr", "learning_rate"
    given = {
        of_torch: _section_of(_section_of(raw, "optimizer"), "kwargs").get("lr"),
        common: raw.get(common),
    }
    engine, own, rate = "torch's optimizer", of_torch, given[of_torch]
    if megatron.get("enabled"):
        engine, own = "Megatron-Core", "megatron_cfg.optimizer.lr"
        rate = _section_of(megatron, "optimizer").get("lr")
    if rate is None and given[common] is not None:
        own, rate = common, given[common]
    for path, other in given.items():
        if other is not None and _convert(info, other) != _convert(info, rate):
            taken = "not given" if rate is None else f"{rate!r:.40}"
            yield path, f"it is {other!r:.40}; {engine} takes {own}, {taken}"


def _section_of(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class _Whole:
    """A policy's whole mapping, and the type of its top section."""

    raw: Mapping[str, Any]
    root: type[Section]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths that are allowed to be unknown."""
        given = self.raw.get("ignore_unknown_keys")
        return tuple(map(str, given)) if isinstance(given, list | tuple) else ()

    def is_off(self, path: str) -> bool:
        """Whether `path` is below `dtensor_cfg`, whose engine is not the one that is enabled."""
        enabled = _section_of(self.raw, "dtensor_cfg").get("enabled")
        return path.startswith("dtensor_cfg.") and not enabled

    def is_idle(self, path: str) -> bool:
        """Whether `path` is of another engine than the one that is enabled."""
        enabled = [name for name in ENGINES if _section_of(self.raw, name).get("enabled")]
        engine = path.partition(".")[0]
        return bool(enabled) and engine in ENGINES and engine not in enabled

    def means(self, path: str, value: Any) -> bool:
        """Whether `value` equals the value of the key `path`, given or default."""
        *sections, name = path.split(".")
        given: Any = self.raw
        cls = self.root
        for depth, section in enumerate(sections, 1):
            rule = KEYS[".".join(sections[:depth])]
            assert isinstance(rule, Nested) and rule.section, f"{path} is in no typed section"
            given, cls = given.get(section) or {}, rule.section
        info = cls.model_fields[name]
        twin = given.get(name)
        return bool(_convert(info, value) == _convert(info, info.default if twin is None else twin))

    def accepts(self, rule: Rejected, path: str, value: Any) -> bool:
        """Whether this value of a rejected key asks for nothing that is not there."""
        backend = _section_of(self.raw, "generation").get("backend")
        if path.startswith("generation.") and backend not in _OWN_ENGINES:
            return True  # is meant for another engine
        if self.is_off(path):
            return True
        if rule.only:
            return value in rule.only
        return self.means(rule.same_as, value) if rule.same_as else asks_for_nothing(value)


def _convert(info: FieldInfo, value: Any) -> Any:
    """The value as the field holds it, with aliases resolved."""
    try:
        return TypeAdapter(info.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return value  # equals no legal value; validating the section reports what is wrong


def _walk(
    whole: _Whole,
    section: Mapping[str, Any],
    cls: type[Section] | None,
    prefix: str,
    kept: dict[str, Any],
    result: Classified,
) -> Iterator[str]:
    """Sort the keys of one section into the result; yield its problems."""
    for name, value in section.items():
        path = f"{prefix}{name}"
        rule = KEYS.get(path) or KEYS.get(f"{prefix}*")
        if rule is None:
            if path in whole.unknown:
                result.ignored[path] = "unknown, and named in ignore_unknown_keys"
            elif whole.is_off(path):
                result.ignored[path] = "affects the engine of dtensor_cfg only"
            else:
                yield _unknown(whole, prefix, str(name))
        elif value is None and path not in _NULL_IS_A_VALUE:
            continue
        elif isinstance(rule, Nested):
            if isinstance(value, Mapping):
                inner = kept.setdefault(name, {}) if rule.section else {}
                yield from _walk(whole, value, rule.section, f"{path}.", inner, result)
            elif rule.section or value:
                yield f"policy.{path} must be a section of keys, not {value!r}"
        else:
            if isinstance(rule, Ignored):
                result.ignored[path] = rule.why
                if rule.warned and not asks_for_nothing(value):
                    result.warned[path] = rule.why
            elif isinstance(rule, Rejected) and not whole.accepts(rule, path, value):
                yield _rejection(rule, path, value)
            if cls and name in cls.model_fields:
                kept[name] = value


def _rejection(rule: Rejected, path: str, value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    fix = "leave it out"
    if rule.same_as:
        fix += f" or give it the value of policy.{rule.same_as}"
    elif value is True:
        fix += " or set it to false"
    refused = f"policy.{path}={shown} would change {rule.changes} and is not supported"
    return f"{refused}: {rule.why}; {fix}"


def _unknown(whole: _Whole, prefix: str, name: str) -> str:
    """Suggest the same key elsewhere, first where the enabled engine has it, the nearest of the
    section, or all that have an effect; and say what to do with a key from a newer host. Of a key
    that only another engine has, one of this section that is almost the same comes first.
    """
    siblings = SECTIONS[prefix]
    elsewhere = [section for section, rules in SECTIONS.items() if name in rules]
    elsewhere.sort(key=lambda section: (whole.is_idle(section), section.count(".")))
    if name == "param_groups" and whole.is_idle("megatron_cfg."):
        elsewhere.insert(0, "optimizer.")  # a value, whose keys are in no table
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8 if elsewhere else 0.6)
    tops = {section.partition(".")[0] for section in (prefix, *elsewhere)}
    other_engine = len(tops) > 1 and tops <= {*ENGINES}
    if elsewhere and not (near and other_engine):
        hint = f"did you mean policy.{elsewhere[0]}{name}?"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        applied = (k for k, rule in siblings.items() if not isinstance(rule, Ignored | Rejected))
        hint = f"its keys are {', '.join(applied)}."
    return (
        f"policy.{prefix}{name} is unknown: {hint} If the host uses it and it is safe to ignore "
        f"here, add {prefix + name!r} to policy.ignore_unknown_keys"
    )
