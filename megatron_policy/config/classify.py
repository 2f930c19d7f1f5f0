"""Sorts the keys of a raw mapping by the table of keys.

Checks no types, and uses them only to tell whether two keys mean the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Ignored, Nested, Rejected, Rule, asks_for_nothing
from megatron_policy.config.section import Section
from megatron_policy.config.sections import ENGINES, MegatronOptimizerConfig
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
    problems = [*_walk(whole, raw, root, "", result), *_misnamed(whole.unknown)]
    if problems:
        raise ConfigError("\n".join(problems))
    result.ignored |= _of_other_engines(raw)
    result.ignored |= _of_one_tensor_rank(raw) | _without_recomputation(raw)
    result.warned |= _other_learning_rate(raw)
    return result


def _of_other_engines(raw: Mapping[str, Any]) -> dict[str, str]:
    """What Megatron-Core, if it is the engine, does not read, and why."""
    chosen, *others = ENGINES
    if not _section_of(raw, chosen).get("enabled"):
        return {}
    found = {
        name: "affects the engine of this section only, and that of megatron_cfg is enabled"
        for name in others
        if _section_of(raw, name).keys() - {"enabled"}
    }
    return found | {
        name: f"affects the engines of dtensor_cfg and fsdp_cfg only: set megatron_cfg.{name}"
        for name in ("optimizer", "scheduler")
        if raw.get(name)
    }


def _other_learning_rate(raw: Mapping[str, Any]) -> dict[str, str]:
    """The learning rate of a host's other engines, if Megatron-Core trains with another one."""
    info = MegatronOptimizerConfig.model_fields["lr"]
    megatron = _section_of(raw, "megatron_cfg")
    given = _section_of(_section_of(raw, "optimizer"), "kwargs").get("lr")
    own = _section_of(megatron, "optimizer").get("lr")
    counts = raw.get("learning_rate") if own is None else own
    if not megatron.get("enabled") or given is None or _typed(info, given) == _typed(info, counts):
        return {}
    path = "megatron_cfg.optimizer.lr" if own is not None or counts is None else "learning_rate"
    said = "not given" if counts is None else f"{counts!r:.40}"
    return {"optimizer.kwargs.lr": f"it is {given!r:.40}; Megatron-Core takes {path}, {said}"}


def _of_one_tensor_rank(raw: Mapping[str, Any]) -> dict[str, str]:
    """What FSDP2 does between tensor-parallel ranks, if there is one."""
    section = _section_of(raw, "dtensor_cfg")
    alone = (section.get("tensor_parallel_size") or 1) == 1
    if not (section.get("enabled") and section.get("sequence_parallel") and alone):
        return {}
    return {"dtensor_cfg.sequence_parallel": "tensor_parallel_size is 1: no rank shares a sequence"}


def _without_recomputation(raw: Mapping[str, Any]) -> dict[str, str]:
    """What Megatron-Core would recompute, if nothing is."""
    section = _section_of(raw, "megatron_cfg")
    if not section.get("enabled") or section.get("activation_checkpointing"):
        return {}
    names = ("granularity", "method", "num_layers", "modules")
    return {
        f"megatron_cfg.recompute_{name}": "activation_checkpointing is false: nothing is recomputed"
        for name in names
        if section.get(f"recompute_{name}")
    }


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

    def means(self, path: str, value: Any) -> bool:
        """Whether `value` equals the value of the key `path`, given or default."""
        *sections, name = path.split(".")
        given: Any = self.raw
        cls = self.root
        for depth, section in enumerate(sections, 1):
            rule = KEYS[".".join(sections[:depth])]
            assert isinstance(rule, Nested), f"{path} is in no section"
            assert rule.section is not None, f"{path} is in a section without a type"
            given, cls = given.get(section) or {}, rule.section
        info = cls.model_fields[name]
        twin = given.get(name)
        return bool(_typed(info, value) == _typed(info, info.default if twin is None else twin))


def _typed(info: FieldInfo, value: Any) -> Any:
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
    result: Classified,
) -> Iterator[str]:
    """Sort the keys of one section into the result; yield its problems."""
    kept = _at(result.kept, prefix) if cls else {}
    fields = cls.model_fields if cls else {}
    for name, value in section.items():
        path = f"{prefix}{name}"
        rule = KEYS.get(path) or KEYS.get(f"{prefix}*")
        if rule is None:
            if path in whole.unknown:
                result.ignored[path] = "unknown, and named in ignore_unknown_keys"
            elif whole.is_off(path):
                result.ignored[path] = "affects the engine of dtensor_cfg only"
            else:
                yield _unknown(prefix, str(name))
        elif value is None and path not in _NULL_IS_A_VALUE:
            continue
        elif isinstance(rule, Nested):
            if isinstance(value, Mapping):
                yield from _walk(whole, value, rule.section, f"{path}.", result)
                if rule.section is None and name in fields:
                    kept[name] = value
            elif rule.section or value:
                yield f"policy.{path} must be a section of keys, not {value!r}"
        else:
            if isinstance(rule, Ignored):
                result.ignored[path] = rule.why
                if rule.warned and not asks_for_nothing(value):
                    result.warned[path] = rule.why
            elif isinstance(rule, Rejected) and not _harmless(rule, path, value, whole):
                yield _rejection(rule, path, value)
            if name in fields:
                kept[name] = value


def _at(kept: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The mapping for the keys of a section, created if missing."""
    for section in filter(None, prefix.split(".")):
        kept = kept.setdefault(section, {})
    return kept


def _harmless(rule: Rejected, path: str, value: Any, whole: _Whole) -> bool:
    if (
        path.startswith("generation.")
        and whole.raw["generation"].get("backend") not in _OWN_ENGINES
    ):
        return True  # is meant for another engine
    if whole.is_off(path):
        return True
    if rule.only:
        return value in rule.only
    if not rule.same_as:
        return asks_for_nothing(value)
    return whole.means(rule.same_as, value)


def _rejection(rule: Rejected, path: str, value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    fix = "leave it out"
    if rule.same_as:
        fix += f" or give it the value of policy.{rule.same_as}"
    elif value is True:
        fix += " or set it to false"
    said = f"policy.{path}={shown} would change {rule.changes} and is not supported"
    return f"{said}: {rule.why}; {fix}"


def _unknown(prefix: str, name: str) -> str:
    """Suggest the same key elsewhere, the nearest of the section, or all that have an effect; and
    say what to do with a key from a newer host. Of a key that only another engine has, one of this
    section that is almost the same comes first.
    """
    siblings = [path.removeprefix(prefix) for path in KEYS if _section(path) == prefix]
    elsewhere = [path for path in KEYS if path.rsplit(".", 1)[-1] == name]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8 if elsewhere else 0.6)
    tops = {section.partition(".")[0] for section in (prefix, *map(_section, elsewhere))}
    other_engine = len(tops) > 1 and tops <= {*ENGINES}
    if elsewhere and not (near and other_engine):
        hint = f"did you mean policy.{elsewhere[0]}?"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        keys = ", ".join(key for key in siblings if _applies(KEYS[prefix + key]))
        hint = f"its keys are {keys}."
    return (
        f"policy.{prefix}{name} is unknown: {hint} If the host uses it and it is safe to ignore "
        f"here, add {prefix + name!r} to policy.ignore_unknown_keys"
    )


def _misnamed(unknown: tuple[str, ...]) -> Iterator[str]:
    """Keys that cannot be ignored on request: what becomes of them is already decided."""
    for path in unknown:
        if path in KEYS:
            yield (
                f"policy.ignore_unknown_keys names {path!r}, which is known: it is for keys that "
                "this release does not know; take it out of the list"
            )


def _section(path: str) -> str:
    return path[: path.rfind(".") + 1]


def _applies(rule: Rule) -> bool:
    return not isinstance(rule, Ignored | Rejected)
