"""A training run's checkpoint is found, or the error says what was found instead."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.checkpoint.manifest import NAME, CheckpointManifest
from megatron_policy.checkpoint.tracker import TRACKER, commit, companion, complete, find
from megatron_policy.errors import CheckpointError
from tests.unit.training_checkpoints import make_save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that saved three checkpoints, and has committed none of them."""
    for step in (2, 30, 4):
        make_save(tmp_path / "run", step)
    return tmp_path / "run"


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_tracker_decides_and_without_it_the_highest_step_that_is_complete(run: Path) -> None:
    (run / "iter_0000050").mkdir()
    (run / "iter_x").mkdir()
    assert [path.name for path in complete(run)] == ["iter_0000002", "iter_0000004", "iter_0000030"]
    assert find(run) == run / "iter_0000030"
    commit(run, 4)
    assert find(run) == find(str(run)) == run / "iter_0000004" == tracker.directory(run, 4)
    assert (run / TRACKER).read_text() == "4"
    (run / TRACKER).write_text("2\n")
    assert find(run) == run / "iter_0000002"
    assert find(run / "iter_0000004") == run / "iter_0000004"
    shutil.move(run / "iter_0000004", run / "elsewhere")
    assert find(run / "elsewhere") == run / "elsewhere"
    assert tracker.directory(run, 123456789).name == "iter_123456789"


def test_a_directory_named_for_a_step_is_taken_at_its_word(run: Path) -> None:
    (run / "iter_0000004" / NAME).unlink()
    assert find(run / "iter_0000004") == run / "iter_0000004"
    made = f"{run / 'iter_0000004'} OUT --to hf{{}}` makes of it: policy.model_name"
    assert made.format("") in unread(run / "iter_0000004")
    (run / "iter_0000004" / "hf" / "config.json").unlink()
    assert made.format(" --config MODEL") in unread(run / "iter_0000004")
    for file in (run / "iter_0000004").glob("*.distcp"):
        file.unlink()
    files = "Load another checkpoint: a directory with checkpoint.json and .distcp files"
    assert files in unread(run / "iter_0000004")


def unread(path: Path) -> str:
    with pytest.raises(CheckpointError, match="missing: is the checkpoint complete") as caught:
        manifest.read(path)
    return str(caught.value)


def test_where_nothing_is_the_error_says_what_to_give(tmp_path: Path) -> None:
    assert "does not exist: give the directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file: give the directory" in refused(tmp_path / "file")
    said = refused(tmp_path)
    assert "it has no complete iter_* directory. Give the directory that checkpoints were" in said
    assert "with checkpoint.json and .distcp files; a model to start from is policy.mod" in said
    (tmp_path / "config.json").touch()
    assert "a Hugging Face model, which policy.model_name starts from" in refused(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert "adapters, which policy.megatron_cfg.peft.start_from starts from" in refused(tmp_path)
    (tmp_path / "__0_0.distcp").touch()
    convert = f"`megatron-policy convert {tmp_path} OUT --to hf --config MODEL` makes a model of it"
    assert f"no policy has saved, and it cannot be resumed. {convert}" in refused(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    for name in ("iter_0000001", "iter_0000002/hf"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("iter_0000001/__0_0.distcp", "iter_0000002/__0_0.distcp"):
        (tmp_path / name).touch()
    (tmp_path / "iter_0000002" / "hf" / "config.json").touch()
    convert = f"`megatron-policy convert {tmp_path / 'iter_0000002'} OUT --to hf` makes a model"
    assert convert in refused(tmp_path), "the directory that can be converted"
    (tmp_path / ".iter_0000012.partial-0123").mkdir()
    assert "a save to it was not finished, and no other before it" in refused(tmp_path)


@pytest.mark.parametrize("text", ["7", "release", "", "-2", "\0\xff", "²", "4" * 5000, "4 30"])
def test_a_tracker_that_names_nothing_is_refused_with_what_is_there(run: Path, text: str) -> None:
    (run / TRACKER).write_text(text, encoding="latin-1" if "\xff" in text else "utf-8")
    said = refused(run)
    assert str(run / TRACKER) in said
    assert "it has iter_0000002, iter_0000004, iter_0000030" in said
    assert len(said) < 400


def test_a_tracker_that_names_half_a_checkpoint_or_cannot_be_read_is_refused(run: Path) -> None:
    commit(run, 30)
    (run / "iter_0000030" / NAME).unlink()
    said = refused(run)
    assert f"{run / 'iter_0000030'} has no {NAME}: another program wrote it" in said
    assert f"megatron-policy convert {run / 'iter_0000030'} OUT --to hf" in said
    assert "it has iter_0000002, iter_0000004)" in said
    (run / TRACKER).unlink()
    assert find(run) == run / "iter_0000004"
    (run / TRACKER).mkdir()
    assert f"{run / TRACKER} cannot be read: Is a directory" in refused(run)


def test_a_commit_leaves_nothing_beside_the_tracker_and_fails_with_its_name(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    commit(tmp_path, 12)
    assert os.listdir(tmp_path) == [TRACKER] and (tmp_path / TRACKER).read_text() == "12"
    with pytest.raises(CheckpointError, match=f"{TRACKER} cannot be written: No such file"):
        commit(tmp_path / "gone", 3)


def test_the_optimizer_of_the_same_save_is_found_by_its_id(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "optimizer"
    weights = make_save(tmp_path / "weights", 4, contains=("weights",), optimizer_elsewhere=True)
    make_save(other, 4, contains=("optimizer",))
    assert companion(weights, other) == other / "iter_0000004"
    assert companion(weights, other / "iter_0000004") == other / "iter_0000004"
    # The same step was saved again, and killed between the optimizer's directory and the weights'.
    (other / "iter_0000004").rename(other / ".iter_0000004.partial-01")
    make_save(other, 4, contains=("optimizer",), id="another")
    assert companion(weights, other) == other / ".iter_0000004.partial-01"


def optimizer_refused(weights: CheckpointManifest, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        companion(weights, path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_an_optimizer_of_another_save_or_none_is_refused(run: Path, tmp_path: Path) -> None:
    weights = manifest.read(make_place(tmp_path, "ab"))
    assert "does not exist" in optimizer_refused(weights, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    said = optimizer_refused(weights, tmp_path / "empty")
    assert "it has no complete iter_* directory" in said and "fresh_optimizer=True" in said
    said = optimizer_refused(weights, run)
    assert f"{weights.root}, which is of step 4, save ab: " in said
    assert f"{run / 'iter_0000004'} is of step 4, save {4:032x}" in said
    said = optimizer_refused(weights, run / "iter_0000030")
    assert f"{run / 'iter_0000030'} is of step 30, save {30:032x}. Give" in said
    assert "save ab, without an optimizer's state" in optimizer_refused(weights, weights.root)


def make_place(tmp_path: Path, name: str) -> Path:
    make_save(tmp_path / "weights", 4, contains=("weights",), id=name)
    return tmp_path / "weights" / "iter_0000004"
