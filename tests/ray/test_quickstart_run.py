"""`examples/quickstart` and `examples/shapes` as their READMEs start them, cut short: they do not
wait for anything to be learnt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from transformers import AutoConfig, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(
    folder: Path, *options: str, example: str = "quickstart", **env: str
) -> subprocess.CompletedProcess[str]:
    """`run.py` of an example in a folder and with an import path that do not lead to the
    checkout.
    """
    inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "RAY_ADDRESS")}
    command = [sys.executable, str(EXAMPLES / example / "run.py"), *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=inherited | env,
        text=True,
        timeout=600,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_quickstart_leaves_a_policy_that_transformers_agrees_with(tmp_path: Path) -> None:
    done = run(tmp_path, "--sft-steps", "3", "--steps", "2")
    assert done.returncode == 0, done.stdout
    ours = re.findall(r"^ +\d+ s  .*$", done.stdout, re.MULTILINE)
    assert len(ours) > 5
    assert [each for each in ours if len(each.replace(f"{tmp_path}/", "")) > 80] == []
    assert "check passed" in done.stdout
    output = tmp_path / "outputs" / "quickstart"
    summary = json.loads((output / "summary.json").read_text())
    assert summary["logprob_difference"] <= summary["logprob_tolerance"]
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["phase"], line["step"]) for line in lines]
    assert steps == [("sft", 1), ("sft", 2), ("sft", 3), ("grpo", 1), ("grpo", 2)]
    assert AutoTokenizer.from_pretrained(output / "policy").eos_token == "<end>"


def test_the_example_with_pictures_leaves_answers_and_a_policy_that_transformers_agrees_with(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "--sft-steps", "2", "--steps", "1", example="shapes")
    assert done.returncode == 0, done.stdout
    output = tmp_path / "outputs" / "shapes"
    summary = json.loads((output / "summary.json").read_text())
    assert summary["logprob_difference"] <= summary["logprob_tolerance"]
    assert (output / "answers.png").read_bytes().startswith(b"\x89PNG")
    for written in ("start", "policy"):
        assert AutoConfig.from_pretrained(output / written).model_type == "qwen3_vl"


@pytest.mark.nightly
def test_a_layout_that_does_not_fit_ends_the_quickstart_with_the_legal_values(
    tmp_path: Path,
) -> None:
    address = ray.get_runtime_context().gcs_address  # that of the session, and none to be started
    done = run(tmp_path, "--workers", "2", "--tp", "3", RAY_ADDRESS=address)
    assert done.returncode == 2, done.stdout
    assert "tensor_model_parallel_size" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.nightly
def test_a_ray_that_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    told = run(tmp_path, RAY_TMPDIR="/dev/null")
    assert told.returncode == 2 and "Traceback" not in told.stdout, told.stdout
    said = " ".join(told.stdout.split())
    assert "error: Ray could not be started on this machine: [Errno 20] Not a directory" in said
    assert "`ray stop --force`" in said
