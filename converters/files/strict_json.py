"""Writes JSON, and reads untrusted JSON with bounded depth and in time bounded by its length."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Nesting of lists and objects: more than configs, indices and headers have."""
_SHOWN, _SHOWN_CHARACTERS = 20, 200


def parse(text: bytes, finite: bool = True) -> Any:
    """The value of `text`; ValueError saying what is wrong with it.

    Refuses invalid JSON, duplicate keys in an object, and values nested too deeply. With `finite`
    also NaN and infinity, which Python writes in JSON.
    """
    constant, number = (_refuse, _finite) if finite else (None, None)
    try:
        value = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_float=number
        )
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            each
            for held in level
            if isinstance(held, (dict, list))
            for each in (held.values() if isinstance(held, dict) else held)
            if isinstance(each, (dict, list))
        ]
        if not level:
            return value
    raise ValueError(_too_deep())


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; ValueError for duplicate keys."""
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name, _ in pairs:
        if name in seen:
            twice[name[:_SHOWN_CHARACTERS]] = None
        seen.add(name)
    more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
    raise ValueError(f"duplicate keys: {', '.join(list(twice)[:_SHOWN])}{more}")


def encoded(value: Any, indent: int | None = None) -> bytes:
    """The value as JSON in UTF-8.

    If a string has no UTF-8 form, such as the name of a file that has none, everything outside
    ASCII is escaped.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent).encode()


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text[:_SHOWN_CHARACTERS])


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"it has {text}, which is not a number in JSON")


def _too_deep() -> str:
    return f"its values are nested more than {MAX_DEPTH} deep"
