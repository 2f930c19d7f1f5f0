"""The possible rules for a key of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_policy.config.section import Section


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
