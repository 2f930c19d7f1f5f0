"""verl's own PPO trainer, `verl.trainer.main_ppo`, as its users start it: actor, reference and
critic in colocated workers. Two steps are those of verl's own engine, and those of verl's own
configuration of Megatron with our engine. The trainer ends whatever fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.hosts.real.verl.comparison import check_same
from tests.hosts.real.verl.configs import BUILT_IN, ORACLE, OURS, Case
from tests.hosts.real.verl.faults import GONE, MESSAGE
from tests.hosts.real.verl.main_ppo import STEPS, Trainer
from tests.hosts.real.verl.trainers import logged
from tests.hosts.real.verl.worker import Record

WHOLE = (
    f"trainer.save_freq={STEPS}",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
)
TOKENS = 4096
"""More than a batch has: each step is one microbatch of a rank."""
FAILS_S = 300.0
"""Longest that the trainer takes to start, to fail, and to end."""


@pytest.fixture(scope="module")
def trainer(
    qwen2: Path, critic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    with Trainer.started(qwen2, critic, tmp_path_factory.mktemp("r")) as started:
        yield started


def trained(trainer: Trainer, case: Case, folder: Path, **keywords: Any) -> tuple[Record, str]:
    """The metrics of each step and the weights after the last one, with what was printed."""
    ended = trainer.run(case, folder, *WHOLE, **keywords)
    assert ended.code == 0, ended.said[-4000:]
    steps = logged(folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    record = {
        name: np.array([step[name] for step in steps])
        for name in steps[0]
        if name.startswith(("actor/", "critic/")) and "/perf/" not in name
    }
    for role in ("actor", "critic"):
        files = [*(folder / f"global_step_{STEPS}" / role / "huggingface").glob("*.safetensors")]
        assert files
        for file in files:
            for name, weight in load_file(file).items():
                record[f"weights/{role}/{name}"] = weight.float().numpy()
    return record, ended.said


def test_two_steps_of_the_ppo_trainer_are_those_of_verls_own_engine(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case(layout="tp2_sp", packed=True, dynamic=True, tokens=TOKENS)
    oracle = Case(ORACLE, dynamic=True, tokens=TOKENS)
    found, expected = (
        trained(trainer, each, tmp_path_factory.mktemp("run"))[0] for each in (case, oracle)
    )
    assert expected["actor/kl_loss"][1] > 1e-4
    assert (np.abs(expected["actor/grad_norm"]) > 1e-2).all()
    assert np.ptp(expected["critic/vf_loss"]) > 1e-4
    check_same(found, expected)


def test_verls_own_configuration_of_megatron_by_a_switch_trains_what_our_name_trains(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # verl's own has no fp32: both are in bf16, and equal bit for bit.
    built_in, ours = (
        Case(engine, layout="pp2", packed=True, dynamic=True, tokens=TOKENS, dtype="bfloat16")
        for engine in (BUILT_IN, OURS)
    )
    found, said = trained(trainer, built_in, tmp_path_factory.mktemp("run"), switch=True)
    assert "verl's engine 'megatron' is that of megatron_policy here" in said
    expected, _ = trained(trainer, ours, tmp_path_factory.mktemp("run"))
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_a_key_that_is_refused_ends_the_ppo_trainer_and_is_named(
    trainer: Trainer, tmp_path: Path
) -> None:
    key = "actor_rollout_ref.actor.engine.qat.enable=True"
    ended = trainer.run(Case(layout="dp2"), tmp_path, key, limit_s=FAILS_S)
    assert ended.code != 0
    assert "engine.qat.enable=True would change results and is not supported" in ended.said
    assert not (tmp_path / "log.jsonl").exists() or not logged(tmp_path)


@pytest.mark.parametrize("fault", ["raise:1", "kill:1"])
def test_a_loss_that_raises_or_a_worker_that_is_killed_ends_the_ppo_trainer(
    fault: str, trainer: Trainer, tmp_path: Path
) -> None:
    ended = trainer.run(Case(layout="dp2"), tmp_path, fault=fault, limit_s=FAILS_S)
    assert ended.code != 0
    if fault == "raise:1":
        assert "LossError" in ended.said and MESSAGE in ended.said
    else:
        assert any(each in ended.said for each in GONE["ray"]), ended.said[-4000:]
