"""The tables of docs/reference/configuration.md: a row for every key of a configuration."""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_policy.config import numbers
from megatron_policy.config.keys import SECTIONS
from megatron_policy.config.section import (
    Applied,
    Dtype,
    Ignored,
    Nested,
    Rejected,
    Rule,
    Section,
    WeightDtype,
)
from megatron_policy.config.sections import PolicySection
from megatron_policy.coordination.timeouts import LONGEST_TIMEOUT_S, SHORTEST_TIMEOUT_S

ALL, MEGATRON, FSDP2, FSDP1 = "all", "Megatron-Core", "FSDP2", "FSDP1"
FSDP = f"{FSDP2}, {FSDP1}"
ENGINES = {
    "megatron_cfg.checkpoint.": ALL,
    "megatron_cfg.": MEGATRON,
    "reward_model_cfg.": MEGATRON,
    "router_replay.": MEGATRON,
    "dtensor_cfg.": FSDP2,
    "fsdp_cfg.": FSDP1,
    "optimizer": FSDP,
    "scheduler": FSDP,
    "fsdp_offload_enabled": FSDP1,
    "activation_checkpointing_enabled": FSDP1,
}
"""Which training engine reads a key: the first entry that its path begins with; all engines if
there is none.
"""

NUMBERS: dict[Any, str] = {
    numbers.Count: "whole number, 1 or more",
    numbers.CountOrZero: "whole number, 0 or more",
    numbers.Limit: "whole number, 1 or more; 0 and -1: no limit",
    numbers.Bytes: "whole number of bytes, 1 or more",
    numbers.Seed: f"whole number, 0 to {numbers.MAX_SEED}",
    numbers.Rate: f"number, 0 to {numbers.MAX_RATE:g}",
    numbers.RateOrNone: f"number, 0 to {numbers.MAX_RATE:g}; -1: none",
    numbers.Epsilon: f"number, {numbers.LEAST_FP32:g} to {numbers.MAX_RATE:g}",
    numbers.Momentum: "number, 0 or more and less than 1",
    numbers.Fraction: "number, 0 to 1",
    numbers.Probability: "number, more than 0 and at most 1",
    numbers.Norm: f"number, 0 to {numbers.MAX_FP32:g}; 0 and null: no limit",
    numbers.Factor: f"number, {numbers.LEAST_FP32:g} to {numbers.MAX_FP32:g}",
    numbers.Temperature: f"0, or number, {numbers.COLDEST:g} to {numbers.HOTTEST:g}",
    numbers.Seconds: f"seconds, {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:g}",
    numbers.Gib: f"number of GiB, up to {numbers.MAX_GIB:g}",
    Dtype: "`float32`, `bfloat16`, `float16`, or `fp32`, `bf16`, `fp16`",
    WeightDtype: "`float32`, `bfloat16`, or `fp32`, `bf16`",
}
"""What the named kinds of values take."""
SPECIAL = {
    "scheduler": "list of sections of `name` and `kwargs`, the last of `milestones`; or one section"
}
"""What keys take whose type says it badly, by path."""
_PLAIN = {str: "text", int: "whole number", float: "number", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """A row: a key below `policy`, and what is known of it."""

    path: str
    rule: Rule
    takes: str = ""
    default: str = ""
    about: str = ""

    @property
    def engine(self) -> str:
        """The engines that read it."""
        found = (engine for start, engine in ENGINES.items() if self.path.startswith(start))
        return next(found, ALL)


def sections() -> Iterator[tuple[str, list[Key]]]:
    """Every section by its path, with its keys in the order of the table of rules."""
    typed: dict[str, type[Section]] = {"": PolicySection}
    for prefix, rules in SECTIONS.items():
        typed |= {
            f"{prefix}{name}.": rule.section
            for name, rule in rules.items()
            if isinstance(rule, Nested) and rule.section
        }
    for prefix, rules in SECTIONS.items():
        cls = typed.get(prefix)
        yield prefix, [_key(prefix, name, rule, cls) for name, rule in rules.items()]
    for prefix, cls in typed.items():
        yield from _listed(prefix, cls)


def _listed(prefix: str, cls: type[Section]) -> Iterator[tuple[str, list[Key]]]:
    """Sections that are the items of a list, such as groups of parameters."""
    for name, hint in _hints(cls).items():
        args = get_args(hint) if get_origin(hint) is tuple else ()
        if args and inspect.isclass(args[0]) and issubclass(args[0], Section):
            inner, item = f"{prefix}{name}[].", args[0]
            yield inner, [_key(inner, each, Applied(), item) for each in item.model_fields]


def _key(prefix: str, name: str, rule: Rule, cls: type[Section] | None) -> Key:
    if cls is None or name not in cls.model_fields or isinstance(rule, Nested):
        return Key(prefix + name, rule)
    field = cls.model_fields[name]
    default = (
        "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    )
    taken = SPECIAL.get(prefix + name) or takes(_hints(cls)[name])
    return Key(prefix + name, rule, taken, default, _about(cls).get(name, "").rstrip("."))


def _hints(cls: type[Section]) -> dict[str, Any]:
    return {
        name: hint
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if name in cls.model_fields
    }


@cache
def _about(cls: type[Section]) -> dict[str, str]:
    """The documentation of each field: the string after it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not (issubclass(base, Section) and base is not Section):
            continue
        (tree,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if documented and isinstance(field, ast.AnnAssign):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(after.value).split())
    return found


def takes(hint: Any) -> str:
    """The type and the legal values of a key, in words."""
    for kind, text in NUMBERS.items():
        if hint == kind:
            return text
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(takes(each) for each in args if each is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in args)
    if hint is bool:
        return "`true`, `false`"
    if origin is dict:
        return "mapping"
    if origin in (tuple, list):
        return f"list of: {takes(args[0])}"
    if inspect.isclass(hint) and issubclass(hint, Section):
        return "section of " + ", ".join(f"`{name}`" for name in hint.model_fields)
    return _PLAIN[hint]


def _annotated(inner: Any, metadata: tuple[Any, ...]) -> str:
    """Of a named kind with a further limit: the kind, and where it starts."""
    for kind, text in NUMBERS.items():
        known = getattr(kind, "__metadata__", ())
        if known and get_args(kind)[0] == inner and metadata[: len(known)] == known:
            least = [limit.ge for each in metadata[len(known) :] for limit in each.metadata]
            return text + "".join(f", from {each:g} on" for each in least)
    return takes(inner)


def _shown(value: Any) -> str:
    """A default as YAML would have it."""
    if value is None:
        return "not set"
    if isinstance(value, tuple | dict):
        return "empty" if not value else f"`{json.dumps(value)}`"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value or repr('')}`"


def tables() -> str:
    """Every section: its applied keys, then those without effect and those refused."""
    return "\n\n".join(_section(prefix, keys) for prefix, keys in sections())


def _section(prefix: str, keys: list[Key]) -> str:
    cls_title = f"policy.{prefix}".rstrip(".")
    parts = [f"## `{cls_title}`"]
    applied = [key for key in keys if isinstance(key.rule, Applied)]
    others = [key for key in keys if isinstance(key.rule, Ignored | Rejected)]
    nested = [key.path for key in keys if isinstance(key.rule, Nested)]
    if nested:
        links = (f"[`{path.rsplit('.', 1)[-1]}`](#{_anchor(f'policy.{path}')})" for path in nested)
        parts.append(f"Sections in it: {', '.join(links)}.")
    if applied:
        header = ("key", "takes", "default", "engine", "applied: what it does")
        rows = [(_name(key), key.takes, key.default, key.engine, key.about) for key in applied]
        parts.append(table(header, rows))
    if others:
        rows = [(_name(key), _verdict(key.rule), _why(key.rule)) for key in others]
        parts.append(table(("key", "is", "why"), rows))
    return "\n\n".join(parts)


def _anchor(title: str) -> str:
    return "".join(char for char in title.lower() if char.isalnum() or char in "_-")


def _name(key: Key) -> str:
    name = key.path.rsplit(".", 1)[-1]
    return "any other key" if name == "*" else _breakable(key.path, name)


def _breakable(path: str, name: str) -> str:
    """A name with its anchor, which a narrow column can break after an underscore."""
    return f'<code id="{path}">{name.replace("_", "_<wbr>")}</code>'


def _verdict(rule: Rule) -> str:
    if isinstance(rule, Rejected):
        return "rejected"
    return "ignored with a warning" if isinstance(rule, Ignored) and rule.warned else "ignored"


def _why(rule: Rule) -> str:
    assert isinstance(rule, Ignored | Rejected)
    if isinstance(rule, Rejected) and rule.same_as:
        return f"{rule.why}: passes where it equals `{rule.same_as}`"
    return rule.why


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )
