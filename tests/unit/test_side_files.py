"""The files beside a model's weights: which are copied, how, and whose tokenizer is among them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_policy.checkpoint.kept_files import KeptFiles
from megatron_policy.convert import convert, plan_conversion
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.formats.hf_names import INDEX, MANIFEST, SINGLE, side_names
from megatron_policy.converters.formats.side_files import (
    MOST_FILES,
    SideFiles,
    save_tokenizer,
    side_files,
    side_paths,
    write_side_files,
)
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.digests import digest_bytes
from tests.small_disk import small_disk

MIB = 2**20
SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}

COPIED = {
    "config.json": b'{"model_type":"llama",  "dtype": "bfloat16"}',
    "generation_config.json": b'{"top_p": 0.9}',
    "tokenizer.json": "{'ä': 1}".encode(),
    "tokenizer.model": b"\0\1\2",
    "chat_template.jinja": b"{{ x }}\r\n",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "assets/more/picture.png": b"\x89PNG",
}
BESIDE = "checkpoint-5/global_step5/rank_0.pt", "original/x.pth", "onnx/model.onnx_data"
LEFT = (
    *(SINGLE, INDEX, MANIFEST, *BESIDE),
    *("model.safetensors.index.fp16.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("adapter_config.json", "hf_quant_config.json", "quantize_config.json"),
    *(".gitattributes", ".cache/huggingface/config.json.metadata", "assets/.hidden/x"),
    *("original/params.json", "checkpoint-5/trainer_state.json", "onnx/tokenizer.json"),
)


def fill(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """With named chat templates."""
    path = Path(shutil.copytree(checkpoint("qwen2", **SMALL), tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(path)
    assert (path / "additional_chat_templates" / "tool_use.jinja").is_file()
    return path


def test_all_that_belongs_to_a_model_is_copied_byte_for_byte_and_no_weights(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", COPIED | dict.fromkeys(LEFT, b"x"))
    (tmp_path / "out").mkdir()
    write_side_files(side_files(source), tmp_path / "out")
    assert contents_of(tmp_path / "out") == COPIED
    assert side_files(source).nbytes == sum(map(len, COPIED.values()))
    assert [name for name in LEFT if name in side_names([*BESIDE, name])] == []


def test_conversion_carries_folders_both_ways(model: Path, tmp_path: Path) -> None:
    wanted = contents_of(model)
    wanted.pop(SINGLE)
    assert "hf/additional_chat_templates/tool_use.jinja" in (
        plan_conversion(model, tmp_path / "mcore", "mcore").side_files
    )
    convert(model, tmp_path / "mcore", "mcore")
    assert contents_of(tmp_path / "mcore" / "hf") == wanted
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    found = contents_of(tmp_path / "back")
    assert {name: found[name] for name in wanted} == wanted


def test_a_folder_that_contains_itself_is_read_once_and_too_many_files_are_refused(
    tmp_path: Path,
) -> None:
    source = fill(tmp_path / "source", {"config.json": b"{}", "a/b/x": b"x"})
    (source / "a" / "b" / "up").symlink_to("../..")
    (source / "here").symlink_to(".")
    (source / "c").symlink_to("a")
    assert sorted(side_paths(source)) == ["a/b/x", "c/b/x", "config.json"]
    many = tmp_path / "many"
    for name in "abcdefghijklmno":  # 2^15 ways through 15 folders
        (many / name).mkdir(parents=True)
    for name, below in pairwise("abcdefghijklmno"):
        for link in ("one", "two"):
            (many / name / link).symlink_to(f"../{below}")
    with pytest.raises(ConversionError, match=f"more than {MOST_FILES:,} files and folders"):
        side_paths(many)


def test_side_files_are_never_whole_in_memory(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", {"config.json": b"{}", "folder/large": b""})
    os.truncate(source / "folder" / "large", 64 * MIB)
    (tmp_path / "out").mkdir()
    files = side_files(source)
    tracemalloc.start()
    try:
        write_side_files(files, tmp_path / "out")
        kept = KeptFiles(files)
        kept.write(tmp_path / "kept")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for name in ("out", "kept"):
        assert (tmp_path / name / "folder" / "large").stat().st_size == 64 * MIB
    assert peak < 8 * MIB


def test_what_is_kept_outlives_its_directory_and_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    source = fill(tmp_path / "source", dict(COPIED))
    kept = KeptFiles(side_files(source))
    shutil.rmtree(source)
    assert os.listdir(place) == []
    for again in ("one", "two"):
        digests = kept.write(tmp_path / again)
        assert contents_of(tmp_path / again) == COPIED
        assert digests == {name: digest_bytes(content) for name, content in COPIED.items()}
    assert kept.nbytes == sum(map(len, COPIED.values()))
    kept.close()
    kept.close()


def test_a_full_temporary_directory_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fill(tmp_path / "source", {"config.json": b"{}", "large": bytes(4 * MIB)})
    with small_disk(tmp_path / "full") as full:
        monkeypatch.setattr(tempfile, "tempdir", full)
        with pytest.raises(ConfigError, match=f"4,194,306 bytes.* kept in {full}.*TMPDIR"):
            KeptFiles(side_files(source))
        assert os.listdir(full) == []


def test_a_given_tokenizer_takes_the_place_of_the_models_own(model: Path, tmp_path: Path) -> None:
    (model / "merges.txt").write_text("of another tokenizer")
    given = AutoTokenizer.from_pretrained(model)
    given.chat_template = "{{ given }}"
    given.pad_token = given.eos_token
    given.add_tokens(["<new>"])
    kept = KeptFiles(side_files(model), given)
    given.chat_template = "{{ later }}"
    kept.write(tmp_path / "kept")
    (tmp_path / "out").mkdir()
    write_side_files(side_files(model), tmp_path / "out", given)
    for name, template in (("kept", "{{ given }}"), ("out", "{{ later }}")):
        found = AutoTokenizer.from_pretrained(tmp_path / name)
        assert found.chat_template == template
        assert found.pad_token_id == given.eos_token_id and "<new>" in found.get_vocab()
        there = contents_of(tmp_path / name)
        assert there["config.json"] == (model / "config.json").read_bytes()
        assert "merges.txt" not in there
        assert not any(each.startswith("additional_chat_templates/") for each in there)


class Unsavable(SimpleNamespace):
    """A tokenizer whose class fails in the middle of saving."""

    error: Exception = NotImplementedError("this class cannot")

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "half.json").write_text("{")
        raise self.error


def test_a_tokenizer_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(Unsavable(error=OSError(28, "No space left on device")), tmp_path / "out")


@pytest.mark.parametrize("kind", [SimpleNamespace, Unsavable])
def test_a_warning_says_how_a_tokenizer_that_cannot_be_saved_differs(
    model: Path, tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = AutoTokenizer.from_pretrained(model)
    alike = kind(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    other = kind(eos_token_id=own.eos_token_id + 1, pad_token_id=own.pad_token_id)
    wanted = contents_of(model)
    wanted.pop(SINGLE)
    said = f"eos_token_id is {own.eos_token_id + 1} in it and {own.eos_token_id} in the files"
    for name, tokenizer, differs in (("a", alike, False), ("b", other, True), ("c", None, False)):
        caplog.clear()
        (tmp_path / name).mkdir()
        with caplog.at_level(logging.WARNING):
            write_side_files(side_files(model), tmp_path / name, tokenizer)
        assert (said in caplog.text) == ("which differ" in caplog.text) == differs, caplog.text
        assert contents_of(tmp_path / name) == wanted
    caplog.clear()
    no_tokenizer = SideFiles({}, {"config.json": b"{}"})
    write_side_files(no_tokenizer, tmp_path, SimpleNamespace(eos_token_id=3))
    assert caplog.text == "", "a model without a tokenizer is not compared with one"


def test_folders_of_a_hub_repository_are_fetched_by_the_same_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    there = [name for name in (*COPIED, *LEFT) if name != INDEX]
    fetched: list[str] = []

    def fetch(name: str, *, allow_patterns: Any, ignore_patterns: Any, **how: object) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        fetched.extend(filter_repo_objects(there, **patterns))
        return str(tmp_path)

    asked = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in there])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    locate("an-owner/a-model")
    assert {name for name in fetched if "/" in name} == {"additional_chat_templates/tool_use.jinja"}
    assert {SINGLE, "config.json", "tokenizer.model"} <= set(fetched)
