"""Nothing outside a checkpoint's directory is read or copied, whatever its files name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.convert import convert, verify
from megatron_policy.converters.files.contained import LINKS
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_names import INDEX, MANIFEST
from megatron_policy.converters.formats.side_files import side_paths
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.formats.digests import UNSEALED, seal
from tests.unit.training_checkpoints import make_save

SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}


@pytest.fixture(autouse=True)
def no_links_are_allowed(monkeypatch) -> None:
    monkeypatch.delenv(LINKS, raising=False)


@pytest.fixture
def model(checkpoint, tmp_path) -> Path:
    """In several files."""
    source = checkpoint("qwen2", max_shard_size="40KB", **SMALL)
    return Path(shutil.copytree(source, tmp_path / "model"))


def refusal(path: Path, to: str = "mcore") -> str:
    out = path.parent / "out"
    with pytest.raises((ConversionError, ConfigError)) as caught:
        convert(path, out, to)
    assert not out.exists()
    return str(caught.value)


def move_out(file: Path, elsewhere: Path) -> Path:
    """Put the file somewhere else, and a link to it in its place."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(file, elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)
    return elsewhere / file.name


@pytest.mark.parametrize("form", ["../elsewhere/{}", "{out}/{}", "sub/{}", "./../elsewhere/{}", 3])
def test_an_index_names_only_files_beside_it(model: Path, tmp_path, form: Any) -> None:
    index = json.loads((model / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    elsewhere = model / "sub" if form == "sub/{}" else tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(model / file, elsewhere / file)
    wrong = form.format(file, out=elsewhere) if isinstance(form, str) else form
    for name, where in index["weight_map"].items():
        index["weight_map"][name] = wrong if where == file else where
    (model / INDEX).write_text(json.dumps(index))
    said = refusal(model)
    assert repr(wrong) in said and "not a file next to it" in said
    with pytest.raises(ConversionError, match="not a file next to it"):
        HfReader(model)


@pytest.mark.parametrize("name", [INDEX, "config.json", "tokenizer.json", "*.safetensors"])
def test_a_link_out_of_the_directory_is_refused_with_where_it_leads(
    model: Path, tmp_path, name: str, monkeypatch
) -> None:
    file = min(model.glob(name))
    real = move_out(file, tmp_path / "elsewhere")
    said = refusal(model)
    assert f"{file} is a link to {real}, outside the checkpoint" in said
    assert LINKS in said
    (tmp_path / "by another name").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv(LINKS, f"/nowhere{os.pathsep}{tmp_path / 'by another name'}")
    convert(model, tmp_path / "out", "mcore")
    assert verify(model, tmp_path / "out").equal


def test_a_secret_is_not_copied_through_a_link(model: Path, tmp_path) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConversionError, match="is a link to"):
        side_paths(model)
    assert "notes.txt is a link to" in refusal(model)
    (model / "notes.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "secret").rename(tmp_path / "elsewhere" / "secret")
    (model / "folder").symlink_to(tmp_path / "elsewhere")
    assert "folder/secret is a link to" in refusal(model)


def test_links_within_the_directory_and_to_it_are_followed(model: Path, tmp_path) -> None:
    (model / "kept").mkdir()
    shutil.move(model / "tokenizer.json", model / "kept" / "t.json")
    (model / "tokenizer.json").symlink_to("kept/t.json")
    (tmp_path / "alias").symlink_to("model")
    convert(tmp_path / "alias", tmp_path / "out", "mcore")
    copied = (tmp_path / "out" / "hf" / "tokenizer.json").read_bytes()
    assert copied == (model / "kept" / "t.json").read_bytes()


def cached(model: Path, root: Path) -> Path:
    """The model as a hub's cache has it."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_snapshot_in_a_hubs_cache_is_read_and_its_revision_noted(model: Path, tmp_path) -> None:
    snapshot = cached(model, tmp_path / "hub")
    (tmp_path / "alias").symlink_to("hub")
    place = tmp_path / "alias" / snapshot.relative_to(tmp_path / "hub")
    convert(place, tmp_path / "out", "mcore")
    assert verify(tmp_path / "out", model).equal
    source = json.loads((tmp_path / "out" / MANIFEST).read_text())["source"]
    assert source["revision"] == snapshot.name
    assert read_config(place)["vocab_size"] == 250
    with HfReader(place) as reader:
        assert len(reader.shapes) > 10


def test_a_snapshot_with_a_link_past_its_blobs_is_refused(model: Path, tmp_path) -> None:
    snapshot = cached(model, tmp_path / "hub")
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("x")
    (snapshot / "notes.txt").symlink_to(other / "x")
    assert "notes.txt is a link to" in refusal(snapshot)
    (snapshot / "notes.txt").unlink()
    blobs = snapshot.parent.parent / "blobs"
    shutil.move(blobs, tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    assert "is a link to" in refusal(snapshot)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json", "hf", MANIFEST])
def test_a_sharded_checkpoint_with_a_link_out_of_it_is_refused(model, tmp_path, name) -> None:
    convert(model, tmp_path / "mcore", "mcore")
    if name != MANIFEST:
        (tmp_path / "mcore" / MANIFEST).unlink()
    real = move_out(tmp_path / "mcore" / name, tmp_path / "elsewhere")
    assert f"is a link to {real}" in refusal(tmp_path / "mcore", "hf")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "hf/../../secret", ""])
def test_a_manifest_names_only_files_of_its_directory(model: Path, tmp_path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    convert(model, tmp_path / "mcore", "mcore")
    path = tmp_path / "mcore" / MANIFEST
    content = json.loads(path.read_text())
    content |= {"digest": UNSEALED, "files": content["files"] | {name: "0" * 16}}
    path.write_bytes(seal(json.dumps(content).encode()))
    assert f"names {name!r}, which is not in its directory" in refusal(tmp_path / "mcore", "hf")


@pytest.mark.parametrize("text", ["../elsewhere", "/etc", ".", "release/../..", "x" * 10_000])
def test_a_tracker_names_a_step_or_release(tmp_path, text: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
    assert "not a checkpoint's name" in (said := refusal(tmp_path / "run", "hf"))
    assert len(said) < 400


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", "checkpoint.json", "hf/config.json"])
def test_a_training_checkpoint_that_is_or_has_a_link_out_of_it_is_refused(tmp_path, name) -> None:
    make_save(tmp_path / "run", 3)
    place = tmp_path / "run" / "iter_0000003"
    file = move_out(place / name, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link to"):
        manifest.read(place)
    file.replace(place / name)
    tracker.commit(tmp_path / "run", 3)
    move_out(place, tmp_path / "other")
    with pytest.raises(CheckpointError, match="is a link to"):
        tracker.find(tmp_path / "run")
    assert tracker.find(place)  # somebody's own path
