"""The sweep over instruction sets runs every test that compares numbers, and sees what fails."""

from __future__ import annotations

import re

import pytest

from tests.sweep_cpus import (
    LIMIT,
    ROOT,
    SETS,
    Run,
    available,
    comparing_tests,
    environment_of,
    margins_of,
)

PRINTED = """
.... [100%]
=============== largest difference over its tolerance ================
 0.26  logprobs after  (tests/dist/test_invariance.py::test_cell[CP4 | dynamic (x)])
  nan  weights  (tests/ray/test_ray_policy.py::test_two[tp2])
1 passed
"""


def test_tests_that_have_tolerances_are_swept_but_for_those_of_gpus_verl_and_vllm() -> None:
    found = set(comparing_tests())
    assert {"tests/dist/test_invariance.py", "tests/unit/test_merging.py"} <= found
    assert "tests/pure/test_sweep_cpus.py" not in found
    assert {name.split("/")[1] for name in found} == {"dist", "hosts", "pure", "ray", "unit"}


def test_margins_are_read_from_the_summary_of_a_run() -> None:
    found = margins_of(PRINTED)
    assert found["logprobs after"] == 0.26 and list(found) == ["logprobs after", "weights"]
    assert margins_of("1 passed") == {}


@pytest.mark.parametrize(
    ("passed", "margins", "fine"),
    [
        (True, {"loss": LIMIT}, True),
        (True, {"loss": LIMIT + 0.01}, False),
        (True, {"loss": float("nan")}, False),
        (True, {}, False),
        (False, {"loss": 0.1}, False),
    ],
)
def test_a_run_is_fine_only_within_half_of_every_tolerance(
    passed: bool, margins: dict[str, float], fine: bool
) -> None:
    assert Run("own", passed, margins).fine is fine


def test_a_set_replaces_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert environment_of("sse41", 2)["ATEN_CPU_CAPABILITY"] == "default"
    assert environment_of("sse41", 2)["OMP_NUM_THREADS"] == "2"
    assert "ATEN_CPU_CAPABILITY" not in environment_of("own", 1)
    assert {"sse41", "own"} <= set(available()) <= set(SETS)


def test_a_change_has_to_pass_under_a_set_that_is_no_machines_own() -> None:
    exported = re.search(r"^export (.+)\nmake test-latest$", (ROOT / ".ci/run").read_text(), re.M)
    assert exported is not None
    assert dict(each.split("=") for each in exported[1].split()) == SETS["sse41"].environment
