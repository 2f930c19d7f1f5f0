"""`convert` and `verify` as commands: what they print, what they leave, what they exit with."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.cli.sizes import show_size
from megatron_policy.formats.manifest import MANIFEST
from tests.unit.test_package import ROOT
from tests.unit.training_checkpoints import flip, make_save

CONVERT = (sys.executable, "-m", "megatron_policy", "convert")
NAME = "model.layers.1.self_attn.k_proj.weight"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: object, code: int = 1) -> str:
    """The line that a command fails with, which must be all it says."""
    ended, said, error = run(*arguments)
    assert (ended, said) == (code, "")
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def there(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in Megatron-Core's format."""
    path = tmp_path_factory.mktemp("converted") / "mcore"
    assert run("convert", checkpoint("qwen3"), path, "--to", "mcore")[0] == 0
    return path


def test_there_and_back_prints_results_on_stdout_and_the_transfer_on_stderr(
    checkpoint, there: Path, tmp_path: Path
) -> None:
    source, back = checkpoint("qwen3"), tmp_path / "back"
    code, said, noise = run("convert", there, back, "--to", "hf", "--max-memory", "1MiB")
    assert code == 0
    tensors = len(load_file(source / "model.safetensors"))
    assert said.startswith(f"{back}: qwen3, {tensors} tensors, ") and "1 file\n" in said
    assert "the source was compared with its digests" in said
    assert re.fullmatch(r"converted: \S+ kB in \S+ s, \S+ [kMG]?B/s\n", noise)
    code, said, noise = run("verify", source, back)
    assert code == 0 and said.startswith(f"equal: {tensors} tensors, ")
    assert f"{back} matches its digests" in said and f"{source} has no digests" in said
    assert noise.startswith("compared: ")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(load_file(back / "model.safetensors")[name], tensor)


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(checkpoint, tmp_path: Path) -> None:
    arguments = ("convert", checkpoint("qwen3"), tmp_path / "new", "--to", "mcore", "--dry-run")
    code, said, noise = run(*arguments, "--tensors")
    assert (code, noise, list(tmp_path.iterdir())) == (0, "", [])
    assert NAME in said and "decoder.layers.self_attention.linear_qkv.weight" in said
    code, short, noise = run(*arguments)
    assert (code, noise) == (0, "") and said.startswith(short) and NAME not in short


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_a_dry_run_of_many_layers_files_and_experts_fits_a_screen(
    checkpoint, tmp_path: Path, family: str
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
    held = load_file(source / "model.safetensors")
    rows = dict(re.findall(r"^  (\S+) +(\d+) +\S+ k?M?B  (?:bfloat16|float32)$", said, re.M))
    assert sum(map(int, rows.values())) == len(held)
    attention = [name for name in held if re.match(r"model\.layers\.\d+\.self_attn\.", name)]
    assert int(rows["model.layers.*.self_attn"]) == len(attention)


def test_a_dry_run_says_first_what_is_in_the_way(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("convert", checkpoint("qwen3"), tmp_path / "new", "--to", "mcore", "--dry-run")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    code, said, noise = run(*arguments)
    assert code == 1 and said.startswith("qwen3: ")
    assert noise.startswith("error: ") and noise.endswith(f", but {tmp_path} has 1,000 left\n")
    monkeypatch.undo()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis").write_text("x")
    code, said, noise = run(*arguments)
    assert code == 2 and said.startswith("qwen3: ") and "is not a checkpoint" in noise


def test_a_list_of_tensors_belongs_to_a_dry_run(checkpoint, tmp_path: Path) -> None:
    code, said, noise = run(
        "convert", checkpoint("qwen3"), tmp_path / "new", "--to", "mcore", "--tensors"
    )
    assert (code, said, list(tmp_path.iterdir())) == (2, "", []) and "--dry-run" in noise


def test_options_reach_the_conversion(checkpoint, there: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    code, said, _ = run(
        *("convert", there, small, "--to", "hf", "--dtype", "bfloat16"),
        *("--max-shard-size", "40kB", "--config", checkpoint("qwen3")),
    )
    assert code == 0
    files = sorted(small.glob("*.safetensors"))
    assert len(files) > 2 and f"{len(files)} files" in said
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}


def test_what_exists_is_kept_unless_it_may_be_replaced(checkpoint, tmp_path: Path) -> None:
    source, place = checkpoint("qwen3"), tmp_path / "place"
    arguments = ("convert", source, place, "--to", "mcore")
    assert run(*arguments)[0] == 0
    (place / "mine").write_text("x")
    assert f"{place} exists" in refused(*arguments, code=2)
    assert (place / "mine").exists()
    assert run(*arguments, "--overwrite")[0] == 0
    assert not (place / "mine").exists()
    # A directory that is not a checkpoint is never replaced.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("x")
    refused("convert", source, tmp_path / "home", "--to", "mcore", "--overwrite", code=2)
    assert (tmp_path / "home" / "thesis").exists()


def test_a_difference_is_shown_with_its_place_and_counted_by_kind(
    checkpoint, there: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint("qwen3"), other)
    tensors = load_file(other / "model.safetensors")
    tensors[NAME][3, 5] += 1
    del tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, said, noise = run("verify", there, other)
    assert code == 1
    assert re.search(rf"^values: {NAME}: 1 of \d+ differ, first at \[3, 5\]", said, re.MULTILINE)
    assert re.search(r"^missing: model\.norm\.weight is in .*mcore", said, re.MULTILINE)
    error = noise.splitlines()[-1]
    assert error.startswith(f"error: {there} and {other} differ")
    assert "missing 1" in error and "values 1" in error


def test_one_converted_checkpoint_is_compared_with_its_own_digests(
    checkpoint, there: Path, tmp_path: Path
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
    content = bytearray((back / "model.safetensors").read_bytes())
    content[-3] ^= 1  # of a tensor
    content[9] ^= 1 << 5  # of the header
    (back / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in run("verify", back)[2]
    tensors = load_file(checkpoint("qwen3") / "model.safetensors")
    tensors["another"] = tensors.pop("model.norm.weight")
    tensors[NAME] += 1
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    code, said, noise = run("verify", back)
    assert (code, said) == (1, "") and noise.startswith("checked: ")
    error = noise.splitlines()[-1]
    assert error.startswith(f"error: {back} does not match its digests: ")
    for words in ("lacks model.norm.weight", "another has no digest", f"{NAME} is damaged"):
        assert words in error


@pytest.mark.parametrize("kind", ["hf", "mcore"])
def test_one_checkpoint_without_digests_cannot_be_checked(
    checkpoint, there: Path, tmp_path: Path, kind: str
) -> None:
    path = checkpoint("qwen3")
    if kind == "mcore":
        path = tmp_path / "copy"
        shutil.copytree(there, path)
        (path / "megatron_policy.json").unlink()
    assert f"{path} has no digests, so it cannot be checked" in refused("verify", path)


@pytest.mark.parametrize("place", ["run", "directory"])
def test_a_training_checkpoint_is_described_and_compared_with_its_digests(
    tmp_path: Path, place: str
) -> None:
    saved = make_save(tmp_path / "run", 3)
    root = tmp_path / "run" / "iter_0000003"
    path = root if place == "directory" else tmp_path / "run"
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
    for command in (["verify", path], ["verify", path, path]):
        error = refused(*command)
        assert f"{root / '__0_1.distcp'} is damaged" in error and "three.bias" in error
    flip(root / "checkpoint.json", 30)
    assert "checkpoint.json is damaged" in refused("verify", path)


def test_of_a_training_checkpoint_it_is_said_where_to_look_or_what_is_missing(
    checkpoint, tmp_path: Path
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


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_flipped_bit_fails_with_the_tensor_that_has_it(
    there: Path, tmp_path: Path, command: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(there, bad)
    (file,) = bad.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    arguments = [tmp_path / "out", "--to", "hf"] if command == "convert" else [there]
    code, _, error = run(command, bad, *arguments)
    assert code == 1 and error.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_a_field_that_no_family_knows_is_left_out_of_what_is_written(
    checkpoint, tmp_path: Path
) -> None:
    source, out, back = tmp_path / "model", tmp_path / "out", tmp_path / "back"
    shutil.copytree(checkpoint("qwen3"), source)
    file = source / "config.json"
    written = json.dumps(json.loads(file.read_text()) | {"new_trick": 3})
    file.write_text(written)
    error = refused("convert", source, out, "--to", "mcore")
    assert "hf_config_overrides {new_trick: null} leaves it out" in error
    option = "--hf-config-overrides"
    assert run("convert", source, out, "--to", "mcore", option, "new_trick=null")[0] == 0
    assert file.read_text() == written
    assert run("convert", out, back, "--to", "hf")[0] == 0
    assert json.loads((back / "config.json").read_text())["new_trick"] is None
    error = refused("convert", out, back, "--to", "hf", option, "rope_theta=1.0", code=2)
    assert "is no Hugging Face model" in error
    assert run("convert", source, out, "--to", "mcore", option, "new_trick")[0] == 2


def damaged(source: Path, path: Path, damage: str) -> Path:
    shutil.copytree(source, path)
    weights = path / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "header":
        weights.write_bytes(b"\xff" * 64)
    elif damage == "unknown architecture":
        (path / "config.json").write_text('{"model_type": "unheard-of"}')
    elif damage == "wrong shape":
        tensors = load_file(weights)
        tensors[NAME] = tensors[NAME][1:].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        shutil.rmtree(path)
    return path


@pytest.mark.parametrize(
    "damage",
    ["truncated", "no weights", "header", "unknown architecture", "wrong shape", "nowhere"],
)
def test_a_damaged_source_is_one_line_and_leaves_nothing(
    checkpoint, tmp_path: Path, damage: str
) -> None:
    bad = damaged(checkpoint("qwen3"), tmp_path / "bad", damage)
    code = 2 if damage == "nowhere" else 1
    error = refused("convert", bad, tmp_path / "out", "--to", "mcore", code=code)
    assert {path.name for path in tmp_path.iterdir()} <= {"bad"}
    if damage == "wrong shape":
        assert NAME in error and "decoder.layers.1.self_attention.linear_qkv.weight" in error


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(
    checkpoint, tmp_path: Path
) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(
        [*CONVERT, checkpoint("qwen3"), tmp_path / "out", "--to", "mcore"],
        cwd=ROOT,
        preexec_fn=little_room,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "cannot be written: File too large" in done.stderr


@pytest.mark.nightly
def test_a_terminal_sees_a_bar_and_its_end(checkpoint, tmp_path: Path) -> None:
    outer, inner = pty.openpty()
    done = subprocess.Popen(
        [*CONVERT, checkpoint("qwen3"), tmp_path / "out", "--to", "mcore"],
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
    checkpoint, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert run("verify", source, tmp_path / "back")[0] == 0
    assert run("verify", mcore, source, *named)[0] == run("inspect", mcore, *named)[0] == 0
    assert "config.json" in fetched[-1] and "*.json" in fetched[0]
    assert not any("safetensors" in pattern for patterns in fetched for pattern in patterns)
    assert "is not a directory" in refused("inspect", mcore, "--config", tmp_path / "a", code=2)
