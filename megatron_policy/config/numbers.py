"""The kinds of numbers in a configuration, each with its range.

A range ends where the number's use would overflow, or a little before. Booleans are not numbers
here, although Python says so, and neither infinity nor NaN is within any range.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from megatron_policy.coordination.timeouts import LONGEST_TIMEOUT_S, SHORTEST_TIMEOUT_S

DEFAULT_BUCKET_BYTES = 512 * 2**20
"""The most bytes that one collective of a refit moves, unless the configuration says otherwise."""
MISMATCH_BOUND = 0.1
"""The distance of two log-probabilities of a token, in nats, beyond which tokens are counted,
unless the configuration or a caller says otherwise.
"""
MAX_COUNT = 2**31 - 1
"""Somewhere sizes and counts become 32-bit integers: in collectives, in kernels."""
MAX_BYTES = 2**63 - 1
MAX_SEED = 2**32 - 1
"""The largest seed that all random number generators accept."""
LEAST_FP32, MAX_FP32 = 1.2e-38, 3.4e38
"""The range of float32 at full precision."""
MAX_RATE = 1e6
"""Far above every learning rate and weight decay, and far enough below the limit of float32 for
Adam's division.
"""
COLDEST, HOTTEST = 1e-6, 1e6
"""Logits divided by a temperature in this range, and their gradients, stay within float32."""
SMALLEST_BUFFER_BYTES = 1024
"""Of a refit's buffer, which goes from hand to hand whenever it is full."""
LEAST_GIB, MAX_GIB = SMALLEST_BUFFER_BYTES * 2.0**-30, 2.0**20


def _no_boolean(value: Any) -> Any:
    if type(value).__name__ in ("bool", "bool_"):  # Python's, and NumPy's under either name
        raise ValueError("Input should be a number, not a boolean")
    return value


def _zero_for_none(value: Any) -> Any:
    if value in (math.inf, "inf", ".inf"):
        raise ValueError("Input should be a finite number: 0 means that there is no limit")
    return 0.0 if value is None else value


def _none_for(*numbers: int) -> BeforeValidator:
    """None in place of these numbers."""
    return BeforeValidator(
        lambda value: None if value in numbers and not isinstance(value, bool) else value
    )


def _between(least: float, most: float, besides: str = "") -> AfterValidator:
    """A range, with its ends shown in short form; 0 is legal if `besides` says what it means."""

    def check(value: float) -> float:
        if not least <= value <= most and not (besides and value == 0):
            raise ValueError(f"Input should {besides}lie between {least:g} and {most:g}")
        return value

    return AfterValidator(check)


_NUMBER = BeforeValidator(_no_boolean)
_FINITE = Field(allow_inf_nan=False)

Count = Annotated[int, Field(gt=0, le=MAX_COUNT), _NUMBER]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT), _NUMBER]
Limit = Annotated[Count | None, _none_for(-1, 0)]
"""A count; 0 and -1 mean no limit."""
Bytes = Annotated[int, Field(gt=0, le=MAX_BYTES), _NUMBER]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED), _NUMBER]

Rate = Annotated[float, _FINITE, _between(0.0, MAX_RATE), _NUMBER]
"""A learning rate or a weight decay."""
RateOrNone = Annotated[Rate | None, _none_for(-1)]
"""A factor; -1 stands for none."""
Epsilon = Annotated[float, _FINITE, _between(LEAST_FP32, MAX_RATE), _NUMBER]
"""Added to a denominator; must not be 0 in float32."""
Momentum = Annotated[float, _FINITE, Field(ge=0.0, lt=1.0), _NUMBER]
Fraction = Annotated[float, _FINITE, Field(ge=0.0, le=1.0), _NUMBER]
Probability = Annotated[float, _FINITE, Field(gt=0.0, le=1.0), _NUMBER]
Norm = Annotated[float, _FINITE, _between(0.0, MAX_FP32), _NUMBER, BeforeValidator(_zero_for_none)]
"""A limit on a gradient's L2 norm; 0, and null in a file, mean none."""
Factor = Annotated[float, _FINITE, _between(LEAST_FP32, MAX_FP32), _NUMBER]
"""A factor on a loss."""
Temperature = Annotated[
    float, _FINITE, _between(COLDEST, HOTTEST, "be 0, the likeliest token, or "), _NUMBER
]
Seconds = Annotated[
    float, _FINITE, Field(gt=0.0), _between(SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S), _NUMBER
]
Gib = Annotated[float, _FINITE, _between(LEAST_GIB, MAX_GIB), _NUMBER]
"""Memory in GiB, at least a kibibyte."""
