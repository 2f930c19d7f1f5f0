"""What commands leave the shell with: sizes that parse or are named, one line per error, a code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import subprocess
import sys

import pytest
import typer

from megatron_policy import errors
from megatron_policy.cli import app
from megatron_policy.cli.options import parse_size
from megatron_policy.cli.report import SHOWN_ITEMS, one_line, one_line_errors
from megatron_policy.estimate.sizes import show_size
from megatron_policy.parallel.topology import ranges
from tests.unit.command_line import run
from tests.unit.test_package import ROOT, loaded_by

COMMANDS = ("convert", "inspect", "verify", "parity", "inspect-config")


def test_sizes_are_read_as_people_write_them() -> None:
    texts = ("64MiB", "2GiB", "5GB", "1048576", "1.5 kB", "7b", "3T")
    sizes = [64 << 20, 2 << 30, 5 * 10**9, 1 << 20, 1500, 7, 3 * 10**12]
    assert [parse_size(text) for text in texts] == sizes


@pytest.mark.parametrize("text", ["", "many", "5XB", "-1", "0", "0.1B", "1e9", "GB", "5 iB", "²B"])
def test_what_is_no_size_is_a_usage_error_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_sizes_are_shown_with_three_digits() -> None:
    shown = [show_size(n) for n in (0, 999, 1000, 999_600, 3_090_000_000, 5 * 10**12)]
    assert shown == ["0 B", "999 B", "1 kB", "1 MB", "3.09 GB", "5 TB"]


def test_a_message_of_several_lines_becomes_one_with_the_first_of_its_list() -> None:
    listed = "\n".join(f"  item {n}" for n in range(SHOWN_ITEMS + 3))
    said = one_line(f"these differ:\n{listed}\nfix it.")
    assert said.startswith("these differ: item 0; item 1;")
    assert said.endswith(f"item {SHOWN_ITEMS - 1}; and 3 more; fix it.")
    assert one_line("one") == "one"
    assert one_line("a:\n  b\n  c") == "a: b; c"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.ConfigError("no:\n  such"), 2, "error: no: such\n"),
        (errors.MissingPackageError("pip"), 2, "error: pip\n"),
        (errors.ConversionError("x"), 1, "error: x\n"),
        (errors.WorkerError("rank 1 died", 1), 1, "error: rank 1 died\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/a"), 1, "error: [Errno 28] No space"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 1, "error: [Errno 13] Perm"),
        (MemoryError(), 1, "error: out of memory\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_every_expected_failure_is_one_line_and_a_code(capsys, error, code, said) -> None:
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise error
    out, err = capsys.readouterr()
    assert caught.value.exit_code == code
    assert err.startswith(said) and err.count("\n") == 1 and not out


def test_a_mistake_of_our_own_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError, match="ours"), one_line_errors():
        raise AssertionError("ours")


@pytest.mark.parametrize(
    "line",
    [
        "convert only --to hf",
        "convert a b",
        "convert a b --to gguf",
        "convert a b --to hf --max-memory lots",
        "convert a b --to hf --max-shard-size 0",
        "convert a b --to hf --dtype int8",
        "convert a ./a --to hf",
        "verify",
        "verify a b c",
        "verify a b --max-memory 1XB",
        "inspect",
        "parity a --tp 0",
        "parity a --dtype float16",
        "parity a --tolerance -1",
        "parity a --tokens 1",
        "unheard-of",
    ],
)
def test_a_command_that_is_not_understood_exits_with_2(line: str) -> None:
    code, said, errors = run(*line.split())
    assert code == 2, said + errors
    assert "Traceback" not in said + errors and "Usage:" in said + errors


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("verify {}/policy.yaml", ": `megatron-policy inspect-config` reads configurations\n"),
        ("convert {}/policy.yaml out --to mcore", ": `megatron-policy inspect-config` reads"),
        ("convert {}/config.json out --to mcore", ": give its directory, {}\n"),
        ("inspect {}/policy.yaml", ": `megatron-policy inspect-config` reads configurations\n"),
        ("parity {}/config.json", ": give its directory, {}\n"),
        ("inspect-config {}", "`megatron-policy plan` takes it after --model\n"),
        ("plan {}/config.json", "`megatron-policy plan` takes its directory after --model\n"),
        ("plan Qwen/Qwen2.5-7B", "`megatron-policy plan` takes a model after --model\n"),
    ],
)
def test_a_file_of_another_kind_is_answered_with_what_to_give(tmp_path, line, fix) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "policy.yaml").write_text("policy: {}")
    code, _, errors = run(*line.format(tmp_path).split())
    assert code == 2 and errors.startswith("error: ") and fix.format(tmp_path) in errors


@pytest.mark.parametrize(
    "line",
    [
        "inspect {}",
        "convert {} out --to mcore",
        "verify {}",
        "verify {} {}",
        "parity {}",
        "plan --model {} --gpus 8",
        "plan --refit {}",
        "plan {}.yaml --gpus 8",
        "inspect-config {}.yaml",
    ],
)
@pytest.mark.parametrize("name", ["gone/there", "./gone/model"])
def test_a_model_or_a_file_that_is_not_there_exits_with_2_whatever_the_command(
    line: str, name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    words = line.replace("{}", name).split()
    code, _, errors = run(*words)
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
    assert "gone" in errors
    code, document, _ = run(*words, "--json")
    error = errors.removeprefix("error: ").strip()
    assert (code, json.loads(document)) == (2, {"error": error, "exit_code": 2})


@pytest.mark.parametrize(
    "line",
    ["inspect {}", "convert {} out --to mcore", "plan --model {} --gpus 8", "plan --refit {}"],
)
def test_a_model_of_a_family_that_nobody_knows_exits_with_1_whatever_the_command(
    line: str, tmp_path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for model_type in ("unheard_of", "gpt2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        code, _, errors = run(*line.replace("{}", str(tmp_path)).split())
        assert code == 1 and f"'{model_type}'" in errors and errors.count("\n") == 1


def test_help_of_every_command_is_light(tmp_path) -> None:
    code = (
        "from megatron_policy.cli import app\n"
        f"for name in {COMMANDS}:\n"
        "    try:\n        app([name, '--help'])\n"
        "    except SystemExit as done:\n        assert not done.code\n"
    )
    assert loaded_by(code, tmp_path) <= {"rich", "pydantic"}  # as typer likes


@pytest.mark.nightly
def test_a_reader_that_has_seen_enough_is_no_error(checkpoint) -> None:
    command = (
        f"{sys.executable} -m megatron_policy inspect {checkpoint('qwen2')} --json | head -c 1"
    )
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "error" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "line",
    [
        "inspect {}",
        "verify {} {}",
        "plan --model {} --gpus 2 --seq-len 64",
        "plan --model {} --tp 2 --seq-len 64",
        "plan --refit {} --tp 2",
        *(f"{name} --help" for name in COMMANDS),
    ],
)
def test_a_terminal_of_80_columns_is_enough_and_a_pipe_gets_whole_lines(
    line: str, checkpoint, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "model").symlink_to(checkpoint("qwen2"))
    words = line.replace("{}", "model").split()
    shown = Terminal()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        app(words)
    assert not ended.value.code
    assert [each for each in shown.getvalue().splitlines() if len(each) > 80] == []
    if "--help" not in words:
        piped = run(*words)[1]
        assert piped.split() == shown.getvalue().split()
        assert len(piped.splitlines()) <= len(shown.getvalue().splitlines())


def test_numbers_are_shown_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == ""


def test_errors_of_a_command_name_its_options_and_no_arguments_of_functions(
    checkpoint, tmp_path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "there" / "model.safetensors").write_text("x")
    for out, to, said in [("there", "mcore", ": --overwrite\n"), ("new", "hf", "--to mcore ")]:
        code, _, errors = run("convert", checkpoint("qwen2"), tmp_path / out, "--to", to)
        assert code == 2 and said in errors
        assert "overwrite=" not in errors and "to=" not in errors
