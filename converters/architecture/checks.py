"""Checks of the numbers that an architecture is made of."""

from __future__ import annotations

import math
from typing import Any

from megatron_policy.errors import ConversionError

WIDEST = 2**24
"""More elements in one dimension of a weight are a mistake in the config: numbers of rows and of
columns are listed one by one, and their products counted in 64 bits.
"""


def check_counts(value: Any, *names: str, of: str = "") -> None:
    """ConversionError unless these attributes are positive integers."""
    for name in names:
        count = getattr(value, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConversionError(f"{of}{name} must be a positive integer, not {count!r}")


def check_sizes(value: Any, *names: str, of: str) -> None:
    """ConversionError unless they are positive integers, and none is too wide for a weight."""
    check_counts(value, *names, of=of)
    check_widths(**{f"{of}{name}": getattr(value, name) for name in names})


def check_factors(value: Any, *names: str) -> None:
    """ConversionError unless these attributes are None or positive numbers."""
    for name in names:
        factor = getattr(value, name)
        if factor is not None and not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ConversionError(f"{name} must be a positive number, not {factor!r}")


def check_widths(**widths: object) -> None:
    """ConversionError if one of these dimensions of weights is too large to be meant."""
    for name, width in widths.items():
        if isinstance(width, int) and width > WIDEST:
            raise ConversionError(f"{name} is {width}: no weight is wider than {WIDEST}")
