"""What a caller may give to a save, and what a load tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_policy.checkpoint.report import LoadReport, check_host_data
from megatron_policy.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {"b": {2}}]}, r"host_data\['a'\]\[1\]\['b'\] is a set"),
        ({"path": Path("x")}, r"host_data\['path'\] is a PosixPath"),
        ({"n": numpy.float64(1.0)}, r"host_data\['n'\] is a float64"),
        ({"f": (print,)}, r"host_data\['f'\]\[0\] is a builtin_function_or_method"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        check_host_data(value)


def test_plain_values_and_tensors_pass() -> None:
    check_host_data([1])
    check_host_data({"a": [1, 2.0, None, True, "x", b"y"], 3: {"t": torch.ones(2), "u": (1, ())}})


def test_a_report_says_line_by_line_what_is_not_restored() -> None:
    report = LoadReport("run/iter_0000003", 3, ("weights",), {"optimizer": "it has none"}, {})
    assert str(report).splitlines() == [
        "run/iter_0000003, step 3: restored weights",
        "  not restored: optimizer (it has none)",
    ]
