"""What the comparisons rest on: verl runs on the CPU unmodified, its own engine agrees with itself
however rows are cut, and a comparison sees what differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import verl

from tests import margins
from tests.hosts.real.verl.actor import train_ppo
from tests.hosts.real.verl.comparison import TOLERANCE, check_same, differences
from tests.hosts.real.verl.configs import ORACLE, Case
from tests.hosts.real.verl.worker import train_sft
from tests.ranks import ROOT

NAMES = "import tests, scripts, verl; print(tests.__file__, verl.__file__)"


def test_our_tests_are_imported_where_verl_has_a_package_of_that_name(tmp_path: Path) -> None:
    # As a process starts that a launcher starts somewhere else.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NAMES],
        cwd=tmp_path,
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(ROOT / "tests/__init__.py"), verl.__file__]


def test_its_own_engine_agrees_with_itself_however_rows_are_cut(run: Callable[..., Any]) -> None:
    check_same(run(train_sft, Case(ORACLE)), run(train_sft, Case(ORACLE, dynamic=True)))
    check_same(run(train_ppo, Case(ORACLE), "v0"), run(train_ppo, Case(ORACLE, dynamic=True), "v1"))


def test_training_moves_every_weight_further_than_the_tolerance(run: Callable[..., Any]) -> None:
    sft, ppo = run(train_sft, Case(ORACLE)), run(train_ppo, Case(ORACLE), "v0")
    started = run(train_sft, Case(ORACLE), 0)
    for record in (sft, ppo):
        moved = differences(
            {name: each for name, each in record.items() if name.startswith("weights/")},
            {name: each for name, each in started.items() if name.startswith("weights/")},
        )
        assert moved["weights"] > 50 * TOLERANCE, moved
    assert np.ptp(ppo["loss"]) > 1e-2 and (ppo["grad_norm"] > 0.1).all()


def test_a_comparison_sees_one_weight_that_differs(run: Callable[..., Any]) -> None:
    expected = run(train_sft, Case(ORACLE))
    name = "weights/model.norm.weight"
    other = expected[name].copy()
    other[3] += 3e-5
    with margins.apart(), pytest.raises(AssertionError, match="verl: weights"):
        check_same({**expected, name: other}, expected)
    for key in (name, "grad_norm"):
        other = expected[key].copy()
        other[1] = np.nan
        with margins.apart(), pytest.raises(AssertionError, match="nan is more"):
            check_same({**expected, key: other}, expected)
    with pytest.raises(AssertionError, match=name):
        check_same({key: each for key, each in expected.items() if key != name}, expected)
