"""Two records of one driver: how far apart they are, and how far the numbers went themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from tests import margins

TOLERANCE = 1e-5
"""Of everything in fp32: losses, gradient norms, log-probabilities, entropies, weights."""


def differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict:
    """The largest absolute difference of each kind of number; NaN where either has one."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    largest: dict[str, float] = defaultdict(float)
    for name, array in expected.items():
        assert found[name].shape == array.shape, (name, found[name].shape, array.shape)
        first, _, rest = name.partition("/")
        kind = first if first in ("weights", "received") else rest.rpartition("/")[2] or first
        apart = np.abs(found[name].astype(np.float64) - array).max(initial=0.0)
        largest[kind] = float(np.maximum(largest[kind], apart))
    return dict(largest)


def check_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Every number within the tolerance; what was used of it stands at the end of the run."""
    for kind, difference in differences(found, expected).items():
        margins.check(f"verl: {kind}", difference, TOLERANCE)
