"""How much of each tolerance the tests of a session have used, for the summary that it prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_used: dict[str, float] = {}
_records: list[dict[str, tuple[float, float]]] = []


def check(quantity: str, difference: float, tolerance: float, context: object = "") -> None:
    """AssertionError unless the difference is within the tolerance; NaN never is."""
    assert tolerance > 0, (quantity, tolerance, context)
    share = difference / tolerance
    _used[quantity] = max(share, _used.get(quantity, 0.0))
    for record in _records:
        record[quantity] = max(record.get(quantity, (0.0, tolerance)), (difference, tolerance))
    assert difference <= tolerance, (
        f"{quantity}: {difference:.3g} is more than the {tolerance:.3g} that rounding can explain "
        f"{context}"
    )


@contextmanager
def apart() -> Iterator[dict[str, float]]:
    """The shares of tolerances used within this context, which the summary does not count."""
    before = taken()
    used: dict[str, float] = {}
    try:
        yield used
    finally:
        used.update(taken())
        _used.update(before)


@contextmanager
def recorded() -> Iterator[dict[str, tuple[float, float]]]:
    """The largest difference of each quantity that is checked within this context, and its
    tolerance.
    """
    record: dict[str, tuple[float, float]] = {}
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def taken() -> dict[str, float]:
    """The largest difference over its tolerance by quantity, of this process; forgets them."""
    found = dict(_used)
    _used.clear()
    return found
