"""verl's own SFT trainers with our engine, as their users start them, by torchrun and by Ray: three
steps are those of verl's own engine, they go on where they were, and they end whatever fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hosts.real.processes import environment, ray_head
from tests.hosts.real.verl.comparison import check_same
from tests.hosts.real.verl.configs import BUILT_IN, ORACLE, Case
from tests.hosts.real.verl.faults import GONE, MESSAGE
from tests.hosts.real.verl.trainers import Trainers, logged, write_conversations
from tests.hosts.real.verl.worker import Record

WHOLE = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
CASES = {
    "torchrun": Case(layout="tp2_sp", packed=True, dynamic=True),
    "ray": Case(layout="pp2"),
}
METRICS = ("train/loss", "train/grad_norm", "train/lr")
OF_BF16 = 2e-2
"""Of losses of about 6 whose weights and activations have eight bits: 2 ** -8 of them."""
FAILS_S = 300.0
"""Longest that a trainer takes to start, to fail, and to end."""


@pytest.fixture(scope="module")
def trainers(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    data = write_conversations(tmp_path_factory.mktemp("data") / "train.parquet")
    with ray_head(environment(), tmp_path_factory.mktemp("r"), gpus=0, cpus=8) as address:
        yield Trainers(qwen2, data, address)


@pytest.fixture(scope="module")
def oracle(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Three steps of verl's own engine."""
    folder = tmp_path_factory.mktemp("oracle")
    ended = trainers.run("torchrun", Case(ORACLE), folder, WHOLE)
    assert ended.code == 0, ended.said[-4000:]
    return record_of(folder / "global_step_3", folder)


def record_of(checkpoint: Path, folder: Path) -> Record:
    """The metrics of each step, and the weights of a checkpoint."""
    steps = logged(folder)
    record = {name: np.array([step[name] for step in steps]) for name in METRICS}
    weights: Record = {}
    for file in (checkpoint / "huggingface").glob("*.safetensors"):
        weights |= load_file(file)
    assert weights and all(each.dtype == np.float32 for each in weights.values())
    return record | {f"weights/{name}": each for name, each in weights.items()}


@pytest.fixture(scope="module", params=CASES)
def ours(
    request: pytest.FixtureRequest, trainers: Trainers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Three steps of our engine, saved after the second and the third: the way they were run, and
    the folder.
    """
    folder = tmp_path_factory.mktemp("ours")
    ended = trainers.run(request.param, CASES[request.param], folder, WHOLE, "trainer.save_freq=2")
    assert ended.code == 0, ended.said[-4000:]
    return request.param, folder


def test_three_steps_of_the_sft_trainer_are_those_of_verls_own_engine(
    ours: tuple[str, Path], oracle: Record
) -> None:
    assert len(oracle["train/loss"]) == 3
    check_same(record_of(ours[1] / "global_step_3", ours[1]), oracle)


def test_a_trainer_that_was_ended_goes_on_and_prints_the_same_losses(
    ours: tuple[str, Path], trainers: Trainers, tmp_path: Path
) -> None:
    way, whole = ours
    # What a run leaves that was ended after its second step.
    shutil.copytree(whole / "global_step_2", tmp_path / "global_step_2")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    ended = trainers.run(way, CASES[way], tmp_path, WHOLE)
    assert ended.code == 0, ended.said[-4000:]
    (found,), expected = logged(tmp_path), logged(whole)[2]
    assert found["step"] == expected["step"] == 3
    assert [found[name] for name in METRICS] == [expected[name] for name in METRICS]
    again, once = (record_of(each / "global_step_3", each) for each in (tmp_path, whole))
    for name, weight in once.items():
        assert name in METRICS or np.array_equal(again[name], weight), name


@pytest.mark.parametrize("way", ["torchrun", "ray"])
def test_a_key_that_is_refused_ends_the_trainer_and_is_named(
    way: str, trainers: Trainers, tmp_path: Path
) -> None:
    ended = trainers.run(way, Case(), tmp_path, "engine.qat.enable=True", limit_s=FAILS_S)
    assert ended.code != 0
    assert "engine.qat.enable=True would change results and is not supported" in ended.said
    assert not (tmp_path / "log.jsonl").exists() or not logged(tmp_path)


@pytest.mark.parametrize("way", ["torchrun", "ray"])
def test_a_loss_that_raises_on_one_rank_ends_the_trainer_with_our_message(
    way: str, trainers: Trainers, tmp_path: Path
) -> None:
    ended = trainers.run(way, Case(layout="dp2"), tmp_path, fault="raise:1", limit_s=FAILS_S)
    assert ended.code != 0
    assert "LossError" in ended.said and MESSAGE in ended.said


@pytest.mark.parametrize(
    ("way", "layout"),
    [("torchrun", "dp2"), ("torchrun", "tp2_sp"), ("ray", "dp2"), ("ray", "pp2")],
)
def test_a_worker_that_is_killed_ends_the_trainer(
    way: str, layout: str, trainers: Trainers, tmp_path: Path
) -> None:
    ended = trainers.run(way, Case(layout=layout), tmp_path, fault="kill:1", limit_s=FAILS_S)
    assert ended.code != 0
    assert any(each in ended.said for each in GONE[way]), ended.said[-4000:]


def test_verls_own_configuration_of_megatron_takes_our_engine_by_a_switch(
    trainers: Trainers, oracle: Record, tmp_path: Path
) -> None:
    case = Case(BUILT_IN, layout="tp2_sp", packed=True, dynamic=True, dtype="bfloat16")
    ended = trainers.run("torchrun", case, tmp_path, switch=True)
    assert ended.code == 0, ended.said[-4000:]
    assert "verl's engine 'megatron' is that of megatron_policy here" in ended.said
    steps = logged(tmp_path)
    assert len(steps) == 3
    for step, loss in zip(steps, oracle["train/loss"], strict=True):
        assert step["train/loss"] == pytest.approx(loss, abs=OF_BF16)
