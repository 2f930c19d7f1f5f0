"""A loss that fails on one rank, and keys that are refused: every rank raises our error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.failures import (
    MESSAGE,
    fail_and_go_on,
    refuse,
    refuse_data,
    train_around_nothing,
)
from tests.hosts.real.verl.worker import train_plain

REFUSED = {
    "engine.qat.enable": (True, "quantisation-aware training is not supported"),
    "optim.optimizer": ("muon", "'adam' and 'sgd' are built"),
    "optim.lr_decay_style": ("WSD", "optim.lr_decay_style='WSD'"),
    "model.lora_rank": (8, "set model.lora.rank"),
    "engine.policy.megatron_cfg.num_microbatches": (2, "num_microbatches"),
}


@pytest.mark.parametrize(
    ("layout", "kind", "on"),
    [
        ("one", "raises", 0),
        ("tp2_sp", "raises", 1),
        ("pp2", "raises", 1),
        ("dp2", "raises", 1),
        ("vpp2", "nan", 1),
        ("dp2", "nan", 0),
    ],
)
def test_a_loss_that_fails_on_one_rank_fails_on_every_rank_and_leaves_no_trace(
    layout: str, kind: str, on: int, run: Callable[..., Any]
) -> None:
    case = Case(layout=layout)
    said, record = run(fail_and_go_on, case, kind, on)
    assert len(said) == case.world
    for each in said:
        assert each.startswith("LossError: "), said
    if kind == "raises":
        assert MESSAGE in said[on], said
    expected = run(train_plain, case)
    assert set(record) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(record[name], array), name


@pytest.mark.parametrize("layout", ["one", "pp2", "dp2"])
def test_a_step_whose_mask_counts_nothing_leaves_no_trace(
    layout: str, run: Callable[..., Any]
) -> None:
    case = Case(layout=layout)
    nothing, record = run(train_around_nothing, case)
    expected = run(train_plain, case)
    for name, array in expected.items():
        assert np.array_equal(record[name], array), name
    assert nothing["loss"] == nothing["grad_norm"] == 0.0
    assert nothing["lr"] == expected["lr"][0]


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_is_refused_is_named_with_what_to_set(key: str, run: Callable[..., Any]) -> None:
    value, why = REFUSED[key]
    for said in run(refuse, Case(layout="dp2", overrides={key: value})):
        assert said.startswith("ConfigError: "), said
        assert key.removeprefix("engine.policy.") in said and why in said, said


def test_rows_that_ask_for_what_is_not_computed_are_refused_by_verls_name(
    run: Callable[..., Any],
) -> None:
    key = "calculate_sum_pi_squared"
    for said in run(refuse_data, Case(layout="pp2"), key):
        assert said.startswith("BatchError: ") and key in said, said
