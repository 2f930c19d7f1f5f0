"""What sections of a configuration have in common: their base, dtypes by name, and the rules that
keys can have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


@dataclass(frozen=True)
class Applied:
    """Has the effect that its name says."""


@dataclass(frozen=True)
class Nested:
    """A section whose keys have their own rules, and a type if any of them is applied."""

    section: type[Section] | None = None


@dataclass(frozen=True)
class Ignored:
    """Does not change results here; `why` says what happens instead.

    With `warned`, whoever asks for it is told: without it more memory is used.
    """

    why: str
    warned: bool = False


@dataclass(frozen=True)
class Rejected:
    """Would change results, or what `changes` says. Accepted only if it asks for nothing (null,
    false, 0, an empty section), is one of the values `only`, if any, or means the same as the key
    `same_as`, given or by default.
    """

    why: str
    same_as: str = ""
    only: tuple[Any, ...] = ()
    changes: str = "results"


Rule = Applied | Nested | Ignored | Rejected
Rules = dict[str, Rule]
"""Rules of a section by the names of its keys; `*` stands for any other key of it. In a table, all
names that have one rule are one text, separated by whitespace.
"""


def by_name(table: Rules) -> Rules:
    """The rules of a table by each name alone."""
    rules = {name: rule for names, rule in table.items() for name in names.split()}
    assert len(rules) == sum(len(names.split()) for names in table), "a name has two rules"
    return rules


def switched_off(why: str, what: str, names: str) -> Rules:
    """A section that asks for `what` if its `enabled` is true, which is rejected for `why`.

    Otherwise none of its keys count, neither `names` nor those of another release of the host.
    """
    return {"enabled": Rejected(why), f"{names} *": Ignored(f"affects {what} only")}


def asks_for_nothing(value: Any) -> bool:
    """Whether a value has no effect wherever it is: null, false, 0, an empty section, or one that
    is not `enabled`.
    """
    if isinstance(value, Mapping):
        return not value or ("enabled" in value and not value["enabled"])
    return not value


WeightPrecision = Literal["float32", "bfloat16"]
Precision = Literal["float32", "bfloat16", "float16"]

_DTYPE_NAMES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _full_dtype_name(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


WeightDtype = Annotated[WeightPrecision, BeforeValidator(_full_dtype_name)]
Dtype = Annotated[Precision, BeforeValidator(_full_dtype_name)]


class Section(BaseModel):
    """Base of every section: frozen, without extra keys or pydantic's own reserved prefixes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What differs from the defaults."""
        return find_differences(self, None)


class ValueSection(Section):
    """A section that is one value, such as an item of a list: its fields are no keys."""


def find_differences(section: Section, base: Section | None) -> Iterator[tuple[str, Any]]:
    """The fields of a section that differ from those of `base`, or from the defaults; in them, the
    values of environment variables are left out, since they can be secrets.
    """
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if base is None:
            default = info.get_default(call_default_factory=True)
        else:
            default = getattr(base, name)
        if not info.is_required() and value == default:
            continue
        if isinstance(value, Section) and isinstance(default, type(value)):
            yield name, _Differing(value, default)
        else:
            yield name, dict.fromkeys(value, "...") if name == "env_vars" else value


class _Differing:
    """A section that shows what differs from another of its kind."""

    def __init__(self, section: Section, base: Section) -> None:
        self.section, self.base = section, base

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}={value!r}" for key, value in find_differences(self.section, self.base)
        )
        return f"{type(self.section).__name__}({shown})"
