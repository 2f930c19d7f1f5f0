"""Two inventories of tensors compared in words; knows nothing of what the names stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .blocks import Shape

SHOWN = 20
"""Differences of each kind that are spelled out; the rest is counted."""


@dataclass(frozen=True)
class Expected:
    """A tensor that must be there: its shape, and its counterpart on the other side in words."""

    shape: Shape
    use: str


def compare(expected: Mapping[str, Expected], found: Mapping[str, Shape], unused: str) -> str:
    """The tensors that are missing, unexpected or misshapen, a line each; "" when there are none.

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
        *_listed("missing", missing, line_missing),
        *_listed("unexpected", extra, line_extra),
        *_listed("misshapen", reshaped, line_reshaped),
    ]
    return "\n".join(f"  {line}" for line in lines)


def _listed(kind: str, names: Sequence[str], line: Callable[[str], str]) -> list[str]:
    shown = [line(name) for name in names[:SHOWN]]
    rest = len(names) - len(shown)
    return [*shown, f"and {rest} more {kind}"] if rest else shown
