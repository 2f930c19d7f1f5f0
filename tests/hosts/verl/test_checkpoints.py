"""Checkpoints in verl's folders: what is written where, which are kept, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.hosts.verl.checkpoints import LATEST, VerlFolders
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, SIZES

ALL = ("model", "optimizer", "extra", "hf_model")


class Policy:
    """Writes folders, and fails where it is told to."""

    rank = 0
    fails = False

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, ...]] = []

    def save_checkpoint(
        self, weights: Path, optimizer: Path | None, *, hf_export: Path | None
    ) -> None:
        for each in filter(None, (weights, optimizer)):
            (each / "iter_1").mkdir(parents=True, exist_ok=True)
            (each / "iter_1" / "shard").touch()
        if hf_export is not None:
            self.export_hf(hf_export, overwrite=True)

    def finalize_async_save(self) -> None:
        if self.fails:
            raise CheckpointError("no space left")

    def export_hf(self, path: Path, *, overwrite: bool) -> None:
        path.mkdir(parents=True, exist_ok=overwrite)

    def load_checkpoint(self, *paths: Path, fresh_optimizer: bool | None = None) -> None:
        self.loaded.append(([path.name for path in paths], fresh_optimizer))


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def save_steps(folders: VerlFolders, root: Path, steps: Any, **options: Any) -> None:
    for step in steps:
        folders.save(Policy(), str(root / f"global_step_{step}" / "actor"), ALL, **options)


def test_contents_have_folders_of_their_own_inside_verls(tmp_path: Path) -> None:
    for contents, folders in (
        (("model",), {"weights"}),
        (("model", "optimizer", "extra"), {"weights", "optimizer"}),
        (("hf_model",), {"huggingface"}),
        (ALL, {"weights", "optimizer", "huggingface"}),
    ):
        path = tmp_path / "-".join(contents)
        VerlFolders().save(Policy(), str(path), contents)
        assert names(path) == folders


def test_the_newest_are_kept_and_files_of_verls_stay(tmp_path: Path) -> None:
    folders = VerlFolders()
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_1" / "actor" / "data_0.pt").touch()
    older = tmp_path / "global_step_0" / "actor"
    VerlFolders().save(Policy(), str(older), ALL)
    save_steps(folders, tmp_path, (1, 2, 3, 4), most=2)
    assert names(older) == {"weights", "optimizer", "huggingface"}, "another run wrote it"
    assert names(tmp_path / "global_step_1" / "actor") == {"data_0.pt"}
    assert names(tmp_path / "global_step_2") == set()
    for step in (3, 4):
        assert len(names(tmp_path / f"global_step_{step}" / "actor")) == 3


def test_a_model_that_another_run_left_stays_where_a_step_is_removed(tmp_path: Path) -> None:
    folders, policy = VerlFolders(), Policy()
    start = tmp_path / "global_step_1" / "actor" / "huggingface"
    start.mkdir(parents=True)
    for step in (1, 2):
        path = tmp_path / f"global_step_{step}" / "actor"
        folders.save(policy, str(path), ("model", "optimizer", "extra"), most=1)
    assert names(start.parent) == {"huggingface"}


@pytest.mark.parametrize("most", [None, 0, -1])
def test_without_a_number_all_are_kept(tmp_path: Path, most: int | None) -> None:
    save_steps(VerlFolders(), tmp_path, (1, 2, 3), most=most)
    assert all((tmp_path / f"global_step_{step}" / "actor").is_dir() for step in (1, 2, 3))


def test_a_step_that_is_saved_again_counts_once_and_as_the_newest(tmp_path: Path) -> None:
    folders = VerlFolders()
    save_steps(folders, tmp_path, (1, 2, 1, 3), most=2)
    left = [step for step in (1, 2, 3) if names(tmp_path / f"global_step_{step}")]
    assert left == [1, 3]


def test_nothing_is_removed_for_a_save_that_failed(tmp_path: Path) -> None:
    folders, broken = VerlFolders(), Policy()
    save_steps(folders, tmp_path, (1,), most=1)
    broken.fails = True
    with pytest.raises(CheckpointError, match="no space left"):
        folders.save(broken, str(tmp_path / "global_step_2" / "actor"), ALL, most=1)
    assert len(names(tmp_path / "global_step_1" / "actor")) == 3
    save_steps(folders, tmp_path, (3,), most=1)
    assert names(tmp_path / "global_step_1") == set()


def test_only_the_first_rank_removes_and_names(tmp_path: Path) -> None:
    folders, other = VerlFolders(), Policy()
    other.rank = 1
    for step in (1, 2):
        path = tmp_path / f"global_step_{step}" / "actor"
        folders.save(other, str(path), ALL, most=1, names_latest=True)
    assert len(names(tmp_path / "global_step_1" / "actor")) == 3
    assert not (tmp_path / LATEST).exists()


def test_what_cannot_be_removed_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING):
        save_steps(VerlFolders(), tmp_path, (1, 2), most=1)
    (record,) = caplog.records
    assert "global_step_1/actor could not be removed: [Errno 13]" in record.getMessage()


@pytest.mark.parametrize("below", ["", "actor"])
def test_the_latest_step_is_named_where_verl_resumes_from(tmp_path: Path, below: str) -> None:
    for step in (7, 12):
        path = tmp_path / f"global_step_{step}" / below
        VerlFolders().save(Policy(), str(path), ALL, names_latest=True)
        assert (tmp_path / LATEST).read_text() == str(step)
    assert names(tmp_path) == {LATEST, "global_step_7", "global_step_12"}


def test_a_folder_without_a_step_names_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    VerlFolders().save(Policy(), str(tmp_path / "last"), ALL, names_latest=True)
    assert names(tmp_path) == {"last"} and "is not within a folder global_step_N" in caplog.text


def test_an_optimizer_without_its_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add 'model', or leave 'optimizer' out"):
        VerlFolders().save(Policy(), str(tmp_path), ("optimizer",))
    assert names(tmp_path) == set()


def test_a_load_reads_what_it_is_asked_for(tmp_path: Path) -> None:
    policy, folders = Policy(), VerlFolders()
    folders.save(policy, str(tmp_path), ALL)
    folders.load(policy, str(tmp_path), ("model", "optimizer", "extra"))
    folders.load(policy, str(tmp_path), ("model",))
    assert policy.loaded == [(["weights", "optimizer"], None), (["weights"], True)]


@pytest.mark.parametrize(
    ("saved", "loaded", "kind", "words"),
    [
        (("hf_model",), ("model",), CheckpointError, r"model/huggingface/ \(Megatron\)"),
        (("model",), ("model", "optimizer"), CheckpointError, r"load_contents to \[model\]"),
        (ALL, ("hf_model",), ConfigError, r"load_contents is \['hf_model'\]: add 'model'"),
    ],
)
def test_a_load_of_what_is_not_there_is_refused(
    tmp_path: Path, saved: Any, loaded: Any, kind: type[Exception], words: str
) -> None:
    policy, folders = Policy(), VerlFolders()
    folders.save(policy, str(tmp_path), saved)
    with pytest.raises(kind, match=words):
        folders.load(policy, str(tmp_path), loaded)
    assert not policy.loaded


def save_and_go_on(config: dict[str, Any], root: str) -> list[dict[str, torch.Tensor]]:
    """Save each of two steps, go on, and go on again from the first and the second."""
    data, folders = oracle.make_batch(GLOBAL_BATCH, 13, SIZES["vocab"]), VerlFolders()

    def step(policy: Any) -> dict[str, torch.Tensor]:
        policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        return {name: each.detach().clone() for name, each in policy.named_parameters()}

    with open_policy(config, init_reference_model=False) as policy:
        for number in (1, 2):
            step(policy)
            folders.save(policy, f"{root}/global_step_{number}/actor", ALL, most=2)
        ahead = step(policy)
        folders.load(policy, f"{root}/global_step_2/actor", ("model", "optimizer"))
        again = step(policy)
        folders.load(policy, f"{root}/global_step_2/actor", ("model",))
        afresh = step(policy)
    return [ahead, again, afresh]


def test_a_policy_goes_on_to_the_bit_from_what_was_saved(
    ranks: Any, checkpoint: Any, tmp_path: Path
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), LAYOUTS["TP2+SP"].megatron)
    for ahead, again, afresh in ranks.run(2, save_and_go_on, config, str(tmp_path)):
        assert all(torch.equal(again[name], each) for name, each in ahead.items())
        assert any(not torch.equal(afresh[name], each) for name, each in ahead.items())
    assert len(names(tmp_path / "global_step_1" / "actor")) == 3


def save_over_the_start(config: dict[str, Any], folder: str) -> list[str]:
    """What is said to saves of all contents, then of the model for Hugging Face alone."""
    said = []
    with open_policy(config, init_reference_model=False) as policy:
        for contents in (ALL, ("hf_model",)):
            with pytest.raises(ConfigError) as refused:
                VerlFolders().save(policy, folder, contents, names_latest=True)
            said.append(str(refused.value))
    return said


def test_a_model_that_a_run_started_from_is_not_written_over_and_nothing_is_before_it_is_refused(
    ranks: Any, checkpoint: Any, tmp_path: Path
) -> None:
    """A run whose model is in the folder of a step that it comes to itself."""
    folder = tmp_path / "global_step_1" / "actor"
    start = folder / "huggingface"
    shutil.copytree(checkpoint("qwen2", **SIZES), start)
    held = {each.name: each.read_bytes() for each in start.iterdir()}
    config = policy_config(start, LAYOUTS["TP2+SP"].megatron)

    for said in ranks.run(2, save_over_the_start, config, str(folder)):
        assert len(said) == 2
        assert all("overlaps" in each and "policy.model_name" in each for each in said)
    assert names(tmp_path) == {"global_step_1"}
    assert names(folder) == {"huggingface"}
    assert {each.name: each.read_bytes() for each in start.iterdir()} == held
