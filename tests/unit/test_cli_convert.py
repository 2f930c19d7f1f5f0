"""`convert` and `verify` as commands: what they print, what they leave, what they exit with."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.estimate.sizes import show_size
from megatron_policy.formats.digests import digest_bytes
from megatron_policy.formats.manifest import MANIFEST, read_manifest
from tests.unit.command_line import run
from tests.unit.edited import Tensors, change_tensors, edit
from tests.unit.test_package import ROOT
from tests.unit.training_checkpoints import flip, make_save

NAME = "model.layers.1.self_attn.k_proj.weight"


def refused(*arguments: object, code: int = 1) -> str:
    """The line that a command fails with, which has to be all it says."""
    ended, said, error = run(*arguments)
    assert (ended, said) == (code, "")
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def weights_of(path: Path) -> Path:
    return path / "model.safetensors"


@pytest.fixture(scope="module")
def there(checkpoint, tmp_path_factory) -> Path:
    """A checkpoint in Megatron-Core's format."""
    path = tmp_path_factory.mktemp("converted") / "mcore"
    assert run("convert", checkpoint("qwen3"), path, "--to", "mcore")[0] == 0
    return path


def test_there_and_back_prints_results_on_stdout_and_the_transfer_on_stderr(
    checkpoint, there: Path, tmp_path
) -> None:
    source, back = checkpoint("qwen3"), tmp_path / "back"
    code, said, noise = run("convert", there, back, "--to", "hf", "--max-memory", "1MiB")
    assert code == 0
    tensors = len(load_file(weights_of(source)))
    assert said.startswith(f"{back}: qwen3, {tensors} tensors, ") and "1 file\n" in said
    assert "the source was compared with its digests" in said
    assert re.fullmatch(r"converted: \S+ kB in \S+ s, \S+ [kMG]?B/s\n", noise)
    code, said, noise = run("verify", source, back)
    assert code == 0 and said.startswith(f"equal: {tensors} tensors, ")
    assert f"{back} matches its digests" in said and f"{source} has no digests" in said
    assert noise.startswith("compared: ")


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(checkpoint, tmp_path) -> None:
    arguments = ("convert", checkpoint("qwen3"), tmp_path / "new", "--to", "mcore")
    code, said, noise = run(*arguments, "--dry-run", "--tensors")
    assert (code, noise) == (0, "")
    assert NAME in said and "decoder.layers.self_attention.linear_qkv.weight" in said
    code, short, noise = run(*arguments, "--dry-run")
    assert (code, noise) == (0, "") and said.startswith(short) and NAME not in short
    code, said, noise = run(*arguments, "--tensors")
    assert (code, said, os.listdir(tmp_path)) == (2, "", []) and "--dry-run" in noise


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_a_dry_run_of_many_layers_files_and_experts_fits_a_screen(
    checkpoint, tmp_path, family: str
) -> None:
    source = checkpoint(family, layers=12)
    code, said, _ = run(
        *("convert", source, tmp_path / "new", "--to", "mcore", "--dry-run"),
        *("--dtype", "bfloat16", "--max-shard-size", "100kB"),
    )
    first, *rest = said.splitlines()
    assert code == 0 and first.startswith(f"{family}: {source} -> {tmp_path / 'new'} (")
    assert len(rest) < 24 and max(map(len, rest)) <= 80
    files = re.search(r"in (\d+) files .*\n  __0_0\.distcp to __0_(\d+)\.distcp\n", said)
    assert files is not None and int(files[1]) == int(files[2]) + 1 > 5
    held = load_file(weights_of(source))
    rows = dict(re.findall(r"^  (\S+) +(\d+) +\S+ k?M?B  (?:bfloat16|float32)$", said, re.M))
    assert sum(map(int, rows.values())) == len(held)
    attention = [name for name in held if re.match(r"model\.layers\.\d+\.self_attn\.", name)]
    assert int(rows["model.layers.*.self_attn"]) == len(attention)


def test_a_dry_run_says_first_what_is_in_the_way(checkpoint, tmp_path, monkeypatch) -> None:
    arguments = ("convert", checkpoint("qwen3"), tmp_path / "new", "--to", "mcore", "--dry-run")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    code, said, noise = run(*arguments)
    assert code == 1 and said.startswith("qwen3: ")
    assert noise.startswith("error: ") and f", but {tmp_path} has 1,000 left: free " in noise
    monkeypatch.undo()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis").write_text("x")
    code, said, noise = run(*arguments)
    assert code == 2 and said.startswith("qwen3: ") and "is not a checkpoint" in noise


def test_options_reach_the_conversion(checkpoint, there: Path, tmp_path) -> None:
    small = tmp_path / "small"
    code, said, _ = run(
        *("convert", there, small, "--to", "hf", "--dtype", "bfloat16"),
        *("--max-shard-size", "40kB", "--config", checkpoint("qwen3")),
    )
    assert code == 0
    files = sorted(small.glob("*.safetensors"))
    assert len(files) > 2 and f"{len(files)} files" in said
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}


def test_what_exists_is_kept_unless_it_may_be_replaced(checkpoint, tmp_path) -> None:
    place = tmp_path / "place"
    arguments = ("convert", checkpoint("qwen3"), place, "--to", "mcore")
    assert run(*arguments)[0] == 0
    (place / "mine").write_text("x")
    assert f"{place} exists" in refused(*arguments, code=2)
    assert (place / "mine").exists()
    assert run(*arguments, "--overwrite")[0] == 0
    assert not (place / "mine").exists()


def test_a_difference_is_shown_with_its_place_and_counted_by_kind(
    checkpoint, there: Path, tmp_path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME][3, 5] += 1
        del tensors["model.norm.weight"]

    other = edit(checkpoint("qwen3"), tmp_path / "other", change)
    code, said, noise = run("verify", there, other)
    assert code == 1
    assert re.search(rf"^values: {NAME}: 1 of \d+ differ, first at \[3, 5\]", said, re.MULTILINE)
    assert re.search(r"^missing: model\.norm\.weight is in .*mcore", said, re.MULTILINE)
    error = noise.splitlines()[-1]
    assert error.startswith(f"error: {there} and {other} differ")
    assert "missing 1" in error and "values 1" in error


def test_one_converted_checkpoint_is_compared_with_its_own_digests(
    checkpoint, there: Path, tmp_path
) -> None:
    code, said, noise = run("verify", there)
    first, second, last = said.splitlines()
    assert code == 0 and last == "complete: every digest matches"
    assert re.fullmatch(rf"{there}: qwen3, mcore, \d+ tensors, \S+ kB", first)
    assert second.startswith("written by megatron-policy 0") and str(checkpoint("qwen3")) in second
    assert noise.startswith("checked: ")
    back = tmp_path / "back"
    assert run("convert", there, back, "--to", "hf")[0] == 0
    assert run("verify", back, "--max-memory", "1MiB")[1].startswith(f"{back}: qwen3, hf, ")
    weights = weights_of(back)
    whole = weights.read_bytes()
    flip(weights, len(whole) - 3)  # of a tensor
    flip(weights, 9)  # of the header
    assert "model.safetensors" in run("verify", back)[2]
    weights.write_bytes(whole)

    def change(tensors: Tensors) -> None:
        tensors["another"] = tensors.pop("model.norm.weight")
        tensors[NAME] += 1

    change_tensors(weights, change)
    code, said, noise = run("verify", back)
    assert (code, said) == (1, "") and noise.startswith("checked: ")
    error = noise.splitlines()[-1]
    assert error.startswith(f"error: {back} does not match its digests: ")
    for words in ("lacks model.norm.weight", "another has no digest", f"{NAME} is damaged"):
        assert words in error


def with_config_of(other: Path, root: Path) -> None:
    """Write another model's config.json into a checkpoint, and its digest into the manifest."""
    shutil.copy(other / "config.json", root / "config.json")
    found = read_manifest(root)
    assert found is not None
    digest = digest_bytes((root / "config.json").read_bytes())
    changed = replace(found, files={**found.files, "config.json": digest})
    (root / MANIFEST).write_bytes(changed.encode())


def test_undamaged_weights_with_the_config_of_another_model_are_not_complete(
    checkpoint, there: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    assert run("convert", there, back, "--to", "hf")[0] == 0
    with_config_of(checkpoint("llama"), back)
    error = refused("verify", back)
    assert f"{back}: the checkpoint is not the llama model of its config.json" in error
    assert "unexpected: model.layers.0.self_attn.k_norm.weight" in error
    with_config_of(edit(checkpoint("qwen3"), tmp_path / "smaller", vocab_size=90), back)
    assert "misshapen: model.embed_tokens.weight is" in refused("verify", back)
    llama, twin = checkpoint("llama"), tmp_path / "twin"
    assert run("convert", llama, tmp_path / "mcore", "--to", "mcore")[0] == 0
    assert run("convert", tmp_path / "mcore", twin, "--to", "hf")[0] == 0
    with_config_of(checkpoint("mistral"), twin)
    assert "config.json of a mistral model, but weights that were written as those of a llama" in (
        refused("verify", twin)
    )


def test_one_checkpoint_without_digests_cannot_be_checked(checkpoint, there, tmp_path) -> None:
    copy = Path(shutil.copytree(there, tmp_path / "copy"))
    (copy / MANIFEST).unlink()
    for path in (checkpoint("qwen3"), copy):
        assert f"{path} has no digests, so it cannot be checked" in refused("verify", path)


def test_a_training_checkpoint_is_described_and_compared_with_its_digests(tmp_path) -> None:
    saved = make_save(tmp_path, 3)
    root = tmp_path / "iter_0000003"
    for path in (tmp_path, root):
        code, said, noise = run("verify", path)
        assert code == 0 and noise.startswith("checked: ")
        assert said.splitlines() == [
            f"{root}: qwen2, step 3, weights + optimizer",
            "written by megatron-policy 0.1.0, torch 2.9",
            "layout: tp 2, cp 1, ep 1, dp 1, pp 1",
            f"3 tensors, {show_size(saved.nbytes)} in 2 files",
            "complete: every digest matches",
        ]
    flip(root / "__0_1.distcp", 700)
    for paths in ([tmp_path], [root], [root, root]):
        error = refused("verify", *paths)
        assert f"{root / '__0_1.distcp'} is damaged" in error and "three.bias" in error
    flip(root / "checkpoint.json", 30)
    assert "checkpoint.json is damaged" in refused("verify", root)


def test_of_a_training_checkpoint_it_is_said_where_to_look_or_what_is_missing(
    checkpoint, tmp_path
) -> None:
    make_save(tmp_path, 3, contains=("weights",), optimizer_elsewhere=True)
    said = run("verify", tmp_path)[1]
    assert f"the optimizer state of save {3:032x} is in another directory" in said
    make_save(tmp_path / "optimizer", 3, contains=("optimizer",))
    error = run("verify", tmp_path / "optimizer", checkpoint("qwen3"))[2].splitlines()[-1]
    assert error.endswith("iter_0000003 has no weights to compare, only optimizer")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert "names step 4, but there is no" in refused("verify", tmp_path)
    shutil.move(tmp_path / "iter_0000003", tmp_path / ".iter_0000003.partial-0")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert "a save to it was not finished" in refused("verify", tmp_path)


def test_a_flipped_bit_is_one_error_and_nothing_is_left(there: Path, tmp_path) -> None:
    bad = Path(shutil.copytree(there, tmp_path / "bad"))
    (file,) = bad.glob("*.distcp")
    flip(file, file.stat().st_size // 2)
    for command in (("convert", bad, tmp_path / "out", "--to", "hf"), ("verify", bad, there)):
        code, _, error = run(*command)
        assert code == 1 and error.splitlines()[-1].startswith("error: ")
        assert os.listdir(tmp_path) == ["bad"]


def test_a_field_that_no_family_knows_is_left_out_of_what_is_written(checkpoint, tmp_path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    source = edit(checkpoint("qwen3"), tmp_path / "model", new_trick=3)
    written = (source / "config.json").read_bytes()
    error = refused("convert", source, out, "--to", "mcore")
    assert "hf_config_overrides {new_trick: null} leaves it out" in error
    option = "--hf-config-overrides"
    assert run("convert", source, out, "--to", "mcore", option, "new_trick=null")[0] == 0
    assert (source / "config.json").read_bytes() == written
    assert run("convert", out, back, "--to", "hf")[0] == 0
    assert json.loads((back / "config.json").read_text())["new_trick"] is None
    error = refused("convert", out, back, "--to", "hf", option, "rope_theta=1.0", code=2)
    assert "is no Hugging Face model" in error
    assert run("convert", source, out, "--to", "mcore", option, "new_trick")[0] == 2


@pytest.mark.nightly
def test_a_terminal_sees_a_bar_and_its_end(checkpoint, tmp_path) -> None:
    outer, inner = pty.openpty()
    command = (sys.executable, "-m", "megatron_policy", "convert", checkpoint("qwen3"))
    done = subprocess.Popen(
        [*command, tmp_path / "out", "--to", "mcore"],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.DEVNULL,
        stderr=inner,
    )
    os.close(inner)
    seen = b""
    while True:
        try:
            part = os.read(outer, 4096)
        except OSError:  # how Linux ends a terminal whose programs have gone
            break
        seen += part
    os.close(outer)
    assert done.wait() == 0
    assert "━".encode() in seen and b"converted: " in seen


def test_the_config_of_a_checkpoint_without_one_can_be_that_of_a_model_on_the_hub(
    checkpoint, there: Path, tmp_path, monkeypatch
) -> None:
    import huggingface_hub

    source, mcore = checkpoint("qwen3"), tmp_path / "mcore"
    shutil.copytree(there, mcore)
    shutil.rmtree(mcore / "hf")
    (mcore / MANIFEST).unlink()
    fetched: list[list[str]] = []

    def fetch(name: str, *, allow_patterns: list[str], **how: object) -> str:
        assert name == "an-owner/a-model"
        fetched.append(allow_patterns)
        return str(source)

    asked = SimpleNamespace(siblings=[])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    named = ("--config", "an-owner/a-model")
    assert run("convert", mcore, tmp_path / "back", "--to", "hf", *named)[0] == 0
    copied = (tmp_path / "back" / "tokenizer.json").read_bytes()
    assert copied == (source / "tokenizer.json").read_bytes()
    assert run("verify", source, tmp_path / "back")[0] == 0
    assert run("verify", mcore, source, *named)[0] == run("inspect", mcore, *named)[0] == 0
    assert "config.json" in fetched[-1] and "*.json" in fetched[0]
    assert not any("safetensors" in pattern for patterns in fetched for pattern in patterns)
    assert "is not a directory" in refused("inspect", mcore, "--config", tmp_path / "a", code=2)
