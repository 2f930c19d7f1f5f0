"""The reward of sorted letters, as verl's reward loop calls it."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 if the response is the answer and nothing else, 0 otherwise."""
    return float(solution_str.split() == ground_truth.split())
