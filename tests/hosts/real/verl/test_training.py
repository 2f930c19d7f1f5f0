"""verl's training worker and its worker of actor and reference, with our engine in every layout,
against verl's own FSDP2 engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.real.verl.actor import read_alone, train_ppo
from tests.hosts.real.verl.comparison import TOLERANCE, check_same
from tests.hosts.real.verl.configs import LAYOUTS, Case
from tests.hosts.real.verl.critic import train_beside_an_actor, train_critic
from tests.hosts.real.verl.worker import train_plain, train_sft

CASES = [
    Case(layout=layout, packed=packed, dynamic=packed)
    for layout in LAYOUTS
    for packed in ((True,) if layout == "cp2" else (False, True))
]
"""Each layout padded with a fixed number of rows and packed by tokens."""
HEATED = [Case(layout="pp2"), Case(layout="tp2_sp", packed=True, dynamic=True)]
CRITICS = [case for case in CASES if case.packed or case.layout != "dp2"]
MIXED = [Case(packed=True), Case(dynamic=True), Case(layout="dp2", dynamic=True)]


@pytest.mark.parametrize("case", CASES + MIXED, ids=lambda case: case.id)
def test_sft_is_that_of_verls_own_engine(case: Case, run: Callable[..., Any]) -> None:
    check_same(run(train_sft, case), run(train_sft, case.oracle))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ppo_is_that_of_verls_own_engine(case: Case, run: Callable[..., Any]) -> None:
    layout = "v1" if case.packed else "v0"
    found = run(train_ppo, case, layout)
    check_same(found, run(train_ppo, case.oracle, layout))
    # The reference is the actor before its first step, and does not move.
    assert len(found["loss"]) == 12
    assert np.array_equal(found["0/ref_log_prob"], found["0/log_probs"])
    assert np.array_equal(found["end/ref_log_prob"], found["0/ref_log_prob"])


def test_a_reference_of_another_checkpoint_reads_what_an_actor_of_it_reads(
    run: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    other = checkpoint("qwen2", seed=3)
    named = {"actor_rollout_ref.actor.engine.policy.reference_model_name": other}
    found = run(train_ppo, Case(packed=True, overrides=named), "v1")
    alone = run(read_alone, Case(packed=True), "actor", model=other)["log_probs"]
    for name in ("0/ref_log_prob", "end/ref_log_prob"):
        assert np.array_equal(found[name], alone)
    assert np.abs(found["0/log_probs"] - alone).max() > 100 * TOLERANCE


@pytest.mark.parametrize("temperature", [1.3, None])
@pytest.mark.parametrize("case", HEATED, ids=lambda case: case.id)
def test_ppo_at_another_temperature_or_at_one_for_each_row_is_that_of_verls_own_engine(
    case: Case, temperature: float | None, run: Callable[..., Any]
) -> None:
    layout = "v1" if case.packed else "v0"
    found, expected = (run(train_ppo, each, layout, temperature) for each in (case, case.oracle))
    check_same(found, expected)
    other = run(train_ppo, case.oracle, layout)
    for name in ("0/log_probs", "0/ref_log_prob", "loss", "grad_norm"):
        assert np.abs(expected[name] - other[name]).max() > 100 * TOLERANCE, name


@pytest.mark.parametrize("role", ["actor", "ref"])
@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_a_role_that_is_alone_reads_what_verls_own_engine_reads(
    layout: str, role: str, run: Callable[..., Any]
) -> None:
    case = Case(layout=layout)
    check_same(run(read_alone, case, role), run(read_alone, case.oracle, role))


@pytest.mark.parametrize("case", CRITICS, ids=lambda case: case.id)
def test_a_critic_is_that_of_verls_own_engine(
    case: Case, run: Callable[..., Any], critic: Path
) -> None:
    layout = "v1" if case.packed else "v0"
    found, expected = (
        run(train_critic, each, layout, model=critic) for each in (case, case.oracle)
    )
    assert len(expected["loss"]) == 8 and np.ptp(expected["0/values"]) > 0.1
    check_same(found, expected)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2"])
def test_a_critic_beside_an_actor_is_one_that_is_alone_and_so_is_the_actor(
    layout: str, run: Callable[..., Any], critic: Path
) -> None:
    case = Case(layout=layout)
    beside, actor = run(train_beside_an_actor, case, critic)
    for found, alone in (
        (beside, run(train_critic, case, "v1", model=critic)),
        (actor, run(train_plain, case, 2)),
    ):
        assert set(found) == set(alone)
        for name, array in alone.items():
            assert np.array_equal(found[name], array), name
    own = {name for name in beside if name.startswith("weights/")} - actor.keys()
    assert own == {"weights/score.weight", "weights/score.bias"}
