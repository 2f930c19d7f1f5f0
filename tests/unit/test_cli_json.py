"""`--json`: one document on stdout, whose keys are those of docs/cli.md, also for errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.cli.parity import _tell
from megatron_policy.parity.result import Deviation, Job, Parity

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}
JOB = Job("m", 8, 2, 2, 1, False, "float32", 2, 64, 0, True, 60.0)
DRY_RUN = ("--dry-run", "--tensors")
CLOSE = Deviation(1e-6, 1e-7, 1.0)


def run(*arguments: object) -> tuple[int, Any, str]:
    """The exit code, the document, and what is on stderr."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout), result.stderr


def documented(command: str) -> set[str]:
    """The keys that docs/cli.md lists for a command."""
    _, _, rest = DOCS.read_text().partition(f"\n### {command}\n")
    table, _, _ = rest.partition("\n#")
    return {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }


def keys(documents: Iterable[dict[str, Any]]) -> set[str]:
    return {key for each in documents for key in each}


def config(path: Path, model: Path, **more: Any) -> Path:
    policy = {
        "model_name": str(model),
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "megatron_cfg": {"enabled": True} | more,
    }
    file = path / "policy.yaml"
    file.write_text(yaml.safe_dump({"policy": policy, "data": {}}))
    return file


def test_convert_and_verify_have_the_documented_keys(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, made = checkpoint("qwen2", **SMALL), tmp_path / "made"
    other = checkpoint("qwen2", **SMALL, seed=3)
    _, planned, _ = run("convert", model, made, "--to", "mcore", *DRY_RUN, "--json")
    code, done, _ = run("convert", model, made, "--to", "mcore", "--json")
    assert code == 0 and done["tensors"] == planned["tensors"] and planned["dry_run"]
    assert keys([planned, done]) == documented("convert")
    kinds, written = planned["kinds"], planned["written"]
    assert done["kinds"] == kinds and len(written) == sum(kind["tensors"] for kind in kinds)
    assert sum(each["bytes"] for each in written) == sum(kind["bytes"] for kind in kinds)
    assert {each["name"] for each in written} == set(load_file(model / "model.safetensors"))
    code, again, said = run("convert", model, made, "--to", "mcore", "--dry-run", "--json")
    assert code == 2 and f"error: {again['error']}\n" == said and "--overwrite" in said
    assert again | {"error": None, "written": written} == planned
    code, alone, _ = run("verify", made, "--json")
    assert code == 0 and alone["complete"] and alone["error"] is None
    code, two, said = run("verify", made, other, "--json")
    assert code == 1 and not two["equal"] and two["error"] in said and two["summary"]["values"]
    assert {*alone, *two} <= documented("verify")


def test_inspect_config_and_plan_have_the_documented_keys(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    file = config(tmp_path, checkpoint("qwen2"), pipeline_model_parallel_size=2)
    code, found, _ = run("inspect-config", file, "--json")
    assert code == 0 and found.keys() == documented("inspect-config")
    assert [stage["ranks"] for stage in found["stages"]] == [[0], [1]]
    assert found["sections_not_read"] == ["data"]
    assert found["ignored"] == {}
    code, plans, _ = run("plan", file, "--gpus", "2", "--json")
    assert code == 0 and keys(plans) == documented("plan")
    code, moved, _ = run("plan", "--refit", checkpoint("qwen2"), "--tensors", "--json")
    assert code == 0 and moved.keys() == documented("plan --refit")


def test_inspect_has_the_documented_keys(checkpoint: Callable[..., Path]) -> None:
    code, found, _ = run("inspect", checkpoint("qwen2", **SMALL), "--json")
    assert code == 0 and found.keys() == documented("inspect")


def test_parity_has_the_documented_keys_and_null_for_what_is_not_finite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    holds = Parity(JOB, "qwen2", CLOSE, CLOSE, {0: CLOSE}, 1e-4, 1e-4)
    _tell(holds, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] and found.keys() == documented("parity")
    assert found["layout"] == {"tp": 2, "pp": 1, "ep": 1, "etp": 2}
    with pytest.raises(typer.Exit):
        _tell(replace(holds, logits=Deviation(float("nan"), 0.0, 1.0)), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert not found["holds"] and found["logits"]["max"] is None and "logits" in found["error"]


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "./nowhere", "{out}", "--to", "mcore"),
        ("verify", "./nowhere"),
        ("inspect", "./nowhere"),
        ("parity", "./nowhere"),
        ("plan", "./nowhere.yaml"),
        ("plan", "--refit", "./nowhere"),
        ("inspect-config", "./nowhere.yaml"),
    ],
)
def test_an_error_is_a_document_with_the_exit_code(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    asked = [each.format(out=tmp_path / "out") for each in command]
    ended, document, said = run(*asked, "--json")
    assert document == {"error": said.removeprefix("error: ").strip(), "exit_code": 2}
    assert ended == 2
