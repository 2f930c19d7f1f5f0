"""`--json`: one document on stdout, whose keys are those of docs/cli.md, also for errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from safetensors.torch import load_file

from megatron_policy.cli.parity import report_parity
from megatron_policy.cli.report import show
from megatron_policy.parity.result import Deviation, Job, Parity
from tests.pure.test_config import minimal
from tests.unit import command_line

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}
JOB = Job("m", 8, 2, 2, 1, False, "float32", 2, 64, 0, True, 60.0)
DRY_RUN = ("--dry-run", "--tensors")
CLOSE = Deviation(1e-6, 1e-7, 1.0)


def run(*arguments: object) -> tuple[int, Any, str]:
    """The exit code, the document, and what is on stderr."""
    code, said, errors = command_line.run(*arguments)
    return code, json.loads(said), errors


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


def test_convert_and_verify_have_the_documented_keys(checkpoint, tmp_path) -> None:
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


def test_inspect_config_and_plan_have_the_documented_keys(checkpoint, tmp_path) -> None:
    file, split = tmp_path / "policy.yaml", {"megatron_cfg.pipeline_model_parallel_size": 2}
    policy = minimal(model_name=str(checkpoint("qwen2")), **split)
    file.write_text(yaml.safe_dump({"policy": policy, "data": {}}))
    code, found, _ = run("inspect-config", file, "--json")
    assert code == 0 and found.keys() == documented("inspect-config")
    assert [stage["ranks"] for stage in found["stages"]] == [[0], [1]]
    assert found["sections_not_read"] == ["data"]
    assert found["ignored"] == {}
    code, plans, _ = run("plan", file, "--gpus", "2", "--json")
    assert code == 0 and keys(plans) == documented("plan")
    options = ("--tensors", "--engine-layout", "tp=2", "--json")
    code, moved, _ = run("plan", "--refit", checkpoint("qwen2"), *options)
    assert code == 0 and moved.keys() == documented("plan --refit")


def test_inspect_has_the_documented_keys(checkpoint) -> None:
    code, found, _ = run("inspect", checkpoint("qwen2", **SMALL), "--json")
    assert code == 0 and found.keys() == documented("inspect")


def test_parity_has_the_documented_keys_and_null_for_what_is_not_finite(capsys) -> None:
    holds = Parity(JOB, "qwen2", CLOSE, CLOSE, {0: CLOSE}, 1e-4, 1e-4)
    show(report_parity(holds), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] and found.keys() == documented("parity")
    assert found["layout"] == {"tp": 2, "pp": 1, "ep": 1, "etp": 2}
    with pytest.raises(typer.Exit):
        apart = replace(holds, logits=Deviation(float("nan"), 0.0, 1.0))
        show(report_parity(apart), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert not found["holds"] and found["logits"]["max"] is None and "logits" in found["error"]
