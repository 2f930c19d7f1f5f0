"""What may become of a key of a configuration; knows no key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_policy.config.sections import Section


@dataclass(frozen=True)
class Applied:
    """Has the effect its name says; `note` adds what its name does not."""

    note: str = ""


@dataclass(frozen=True)
class Nested:
    """A section whose keys have rules of their own, and a type if any of them is applied."""

    section: type[Section] | None = None


@dataclass(frozen=True)
class Ignored:
    """Changes no result here; `why` says what happens instead."""

    why: str


@dataclass(frozen=True)
class Rejected:
    """Would change results. Passes only when it asks for nothing (null, false, 0, an empty
    section), is one of the values `only`, where there are such, or means the same as the key
    `same_as`, given or by default."""

    why: str
    same_as: str = ""
    only: tuple[Any, ...] = ()


Rule = Applied | Nested | Ignored | Rejected
Rules = dict[str, Rule]


def each(rule: Rule, names: str) -> Rules:
    """The same rule for every one of `names`, which blanks part."""
    return dict.fromkeys(names.split(), rule)


def switched_off(why: str, what: str, names: str) -> Rules:
    """A section that asks for `what` when its `enabled` is true, which is rejected for `why`; else
    none of its keys count, neither `names` nor those of another release of the host.
    """
    return {
        "enabled": Rejected(why),
        **each(Ignored(f"bears on {what} only"), f"{names} *"),
    }
