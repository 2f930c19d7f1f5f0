"""Weights to inference engines by verl's transport, and checkpoints in verl's folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hosts.real.verl import refits
from tests.hosts.real.verl.checkpoints import load_and_train, save_train_load, send_or_receive
from tests.hosts.real.verl.comparison import check_same
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.conftest import LIMIT_S
from tests.hosts.real.verl.worker import Record
from tests.ranks import RankPool

WITH_HF = {"checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]}


def part(record: Record, prefix: str) -> Record:
    start = f"{prefix}/"
    return {name[len(start) :]: each for name, each in record.items() if name.startswith(start)}


def check_equal(found: Record, expected: Record) -> None:
    """The same names, and the same bits."""
    assert found and set(found) == set(expected)
    for name, array in expected.items():
        assert array.dtype == found[name].dtype and np.array_equal(found[name], array), name


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2"])
def test_every_rank_hands_all_weights_to_its_engine_through_verls_buckets(
    layout: str,
    verl_ranks: RankPool,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = checkpoint("qwen2", hidden=128, ffn=512, vocab=1024)
    case, sockets = Case(layout=layout), str(tmp_path_factory.mktemp("s"))
    ranks = verl_ranks.run(2 * case.world, send_or_receive, case, model, sockets, timeout=LIMIT_S)
    sent = ranks[0][0]
    for received, buckets in ranks[case.world :]:
        assert buckets >= 3
        check_equal(received, sent)
    started = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert {f"weights/{name}" for name in started} == set(sent)
    assert not np.array_equal(sent["weights/model.norm.weight"], started["model.norm.weight"])


@pytest.mark.parametrize(
    "case", [Case(), Case(layout="tp2_sp"), Case(layout="dp2")], ids=lambda case: case.id
)
def test_what_was_saved_is_gone_on_with_to_the_bit(
    case: Case, run: Callable[..., Any], tmp_path: Path
) -> None:
    record = run(save_train_load, case, str(tmp_path), None)
    saved, went_on = part(record, "saved"), part(record, "went on")
    check_equal(part(record, "loaded"), saved)
    check_equal(part(record, "again"), went_on)
    assert not np.array_equal(
        went_on["weights/model.norm.weight"], saved["weights/model.norm.weight"]
    )
    # By a job that starts with it as well.
    new = run(load_and_train, case, str(tmp_path / "global_step_2"))
    check_equal(part(new, "loaded"), saved)
    check_equal(part(new, "again"), went_on)


def test_another_layout_goes_on_with_what_was_saved(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    record = run(save_train_load, Case(layout="pp2"), str(tmp_path), None)
    new = run(load_and_train, Case(layout="tp2_sp"), str(tmp_path / "global_step_2"))
    check_equal(part(new, "loaded"), part(record, "saved"))
    check_same(part(new, "again"), part(record, "went on"))


def test_the_newest_are_kept_and_hold_the_model_for_hugging_face(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    # A file of verl's in a folder of ours stays.
    for step in (2, 3):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}/data_0.pt").touch()
    record = run(save_train_load, Case(overrides=WITH_HF), str(tmp_path), 1)
    assert [each.name for each in (tmp_path / "global_step_2").iterdir()] == ["data_0.pt"]
    newest = tmp_path / "global_step_3"
    names = {"data_0.pt", "weights", "optimizer", "huggingface"}
    assert {each.name for each in newest.iterdir()} == names
    model = AutoModelForCausalLM.from_pretrained(newest / "huggingface", dtype=torch.float32)
    held = {f"weights/{name}": each.numpy() for name, each in model.state_dict().items()}
    weights = {k: each for k, each in part(record, "again").items() if k.startswith("weights/")}
    check_equal(held, weights)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2"])
def test_a_rollout_elsewhere_has_all_weights_through_our_checkpoint_engine(
    layout: str,
    verl_ranks: RankPool,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = checkpoint("qwen2", hidden=128, ffn=512, vocab=1024)
    case, takes = Case(layout=layout), [None, 3, None]
    call = (refits.send_or_receive, case, model, str(tmp_path / "meeting"), takes)
    *actors, rollout = verl_ranks.run(case.world + 1, *call, timeout=LIMIT_S)
    for update in (0, 2):
        check_equal(rollout[update], actors[0][update])
    name = "weights/model.norm.weight"
    assert not np.array_equal(rollout[0][name], rollout[2][name])
    # The rollout did not take all of the second update: every actor hears that.
    assert len(rollout[1]) == 3
    for actor in actors:
        assert "RefitError" in actor[1] and "has not taken all weights" in actor[1]
