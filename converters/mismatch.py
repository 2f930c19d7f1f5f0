"""Compares two inventories of tensors and describes the differences."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_policy.converters.rows.blocks import Shape

if TYPE_CHECKING:
    from torch import dtype

SHOWN = 20
"""Differences of each kind that are spelled out; the rest are counted."""


@dataclass(frozen=True)
class Expected:
    """A tensor that must be present: its shape, and a description of its counterpart."""

    shape: Shape
    use: str


def compare(expected: Mapping[str, Expected], found: Mapping[str, Shape], unused: str) -> str:
    """The tensors that are missing, unexpected or misshapen, one per line; "" if there are none.

    `unused` says why an unexpected one is an error.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    reshaped = [
        name
        for name, want in expected.items()
        if name in found and tuple(found[name]) != want.shape
    ]

    def line_missing(name: str) -> str:
        return f"missing: {name} {list(expected[name].shape)}, which {expected[name].use}"

    def line_extra(name: str) -> str:
        close = difflib.get_close_matches(name, missing[:200], n=1)
        hint = f" (a misspelt {close[0]}?)" if close else ""
        return f"unexpected: {name} {list(found[name])}, {unused}{hint}"

    def line_reshaped(name: str) -> str:
        want = expected[name]
        return (
            f"misshapen: {name} is {list(found[name])}, must be {list(want.shape)}; it {want.use}"
        )

    lines = [
        *_list_lines("missing", missing, line_missing),
        *_list_lines("unexpected", extra, line_extra),
        *_list_lines("misshapen", reshaped, line_reshaped),
    ]
    return "\n".join(f"  {line}" for line in lines)


def list_other_dtypes(
    expected: Mapping[str, Expected], found: Mapping[str, dtype], legal: Collection[dtype]
) -> str:
    """The expected tensors whose dtype is not in `legal`, one per line; "" if there are none."""
    wrong = [name for name in expected if name in found and found[name] not in legal]

    def line(name: str) -> str:
        return f"dtype: {name} is {_short(found[name])}; it {expected[name].use}"

    return "\n".join(f"  {text}" for text in _list_lines("dtypes", wrong, line))


def list_problems(problems: Sequence[str]) -> str:
    """One a line, indented; of more than `SHOWN` the rest are counted."""
    rest = len(problems) - SHOWN
    counted = [f"and {rest} more"] if rest > 0 else []
    return "\n".join(f"  {each}" for each in [*problems[:SHOWN], *counted])


def name_dtypes(dtypes: Collection[dtype]) -> str:
    """The dtypes in words."""
    return " or ".join(map(_short, dtypes))


def _short(dtype: dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list_lines(kind: str, names: Sequence[str], line: Callable[[str], str]) -> list[str]:
    shown = [line(name) for name in names[:SHOWN]]
    rest = len(names) - len(shown)
    return [*shown, f"and {rest} more {kind}"] if rest else shown
