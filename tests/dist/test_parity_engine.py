"""`parity --engine vllm` against a stand-in for vLLM's interpreter, which samples by transformers:
what holds, what is reported, with which causes, and how it fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_policy.cli import app

STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

assert sys.argv[1:3] == ["-m", "megatron_policy.inference.vllm.sample"], sys.argv
folder = Path(sys.argv[3])
assert os.environ["PYTHONPATH"] == str(folder) and (folder / "megatron_policy" / "cli").is_dir()
job, fault = json.loads((folder / "job.json").read_text()), {fault!r}
if fault == "refuse":
    (folder / "refused.json").write_text('"ValueError: no kernel"')
    sys.exit(1)
if fault == "die":
    print("out of luck", flush=True)
    os._exit(3)
torch.manual_seed(job["seed"])
dtype = getattr(torch, job["dtype"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
if fault == "head":
    model.lm_head.weight.data[77, 5] += 0.5
if fault == "embedding":
    model.model.embed_tokens.weight.data *= 1.5
rows = torch.tensor(job["prompts"])
start = rows.shape[1]
with torch.no_grad():
    while rows.shape[1] < job["tokens"]:
        logits = model(rows, use_cache=False).logits[:, -1].float()
        rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1)], 1)
    logits = model(rows, use_cache=False).logits[:, :-1].float()


def said(temperature):
    found = (logits / temperature).log_softmax(-1)
    return found.gather(-1, rows[:, 1:, None])[..., 0]


sampled = said(0.7 if fault == "temperature" else 1.0)[:, start - 1 :]
result = {{
    "version": "0", "rows": rows.tolist(), "sampled": sampled.tolist(),
    "scored": said(1.0).tolist(), "defaults": {{"top_p": 0.8}},
    "text_ids": [2] + job["text"].count("a") * [9],
}}
(folder / "sampled.json").write_text(json.dumps(result))
"""


@pytest.fixture
def run(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[int, Any, str]]:
    path = checkpoint("qwen2", hidden=32, layers=2, ffn=48)

    def call(fault: str, *options: str) -> tuple[int, Any, str]:
        python = tmp_path / "python"
        python.write_text(STAND_IN.format(python=sys.executable, fault=fault))
        python.chmod(0o755)
        common = ["--engine", "vllm", "--engine-python", str(python), "--tokens", "64", "--json"]
        # In a process of its own: a policy changes torch in the process that it runs in.
        command = [sys.executable, "-m", "megatron_policy", "parity", str(path), *common, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        return done.returncode, json.loads(done.stdout), done.stderr

    return call


@pytest.mark.parametrize("options", [(), ("--pp", "2"), ("--dtype", "bfloat16")])
def test_what_is_equal_holds(run: Callable[..., Any], options: tuple[str, ...]) -> None:
    code, found, _ = run("", *options)
    assert code == 0 and found["holds"] and found["error"] is None and found["causes"] == []
    assert (found["prompts"]["tokens"], found["samples"]["tokens"]) == (8 * 63, 8 * 32)
    first, second = found["notes"]
    assert first.startswith("generation_config.json has top_p 0.8: vLLM samples with that unless")
    assert second.startswith("the engine's tokenizer adds [2")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("head", "the head's row of token 77: its log-probabilities are far"),
        ("temperature", "the engine says another log-probability of a token when it draws it"),
        ("embedding", None),
    ],
)
def test_what_is_not_is_reported(run: Callable[..., Any], fault: str, cause: str | None) -> None:
    code, found, error = run(fault)
    assert code == 1 and not found["holds"] and "the engine does not agree: " in error
    if cause is None:
        assert found["causes"] == [] and "cause: none is known: compare the files" in error
    else:
        (own,) = found["causes"]
        assert own.startswith(cause) and cause in error
    whole = found["prompts"]
    assert (whole["max"] <= whole["limit"]) == (fault == "temperature")


def test_how_it_fails(run: Callable[..., Any], tmp_path: Path) -> None:
    code, found, _ = run("refuse")
    assert code == 2 and found["error"].endswith(": ValueError: no kernel")
    code, found, _ = run("die")
    assert code == 1 and found["error"] == (
        "the process of vLLM exited with code 3; its last output: out of luck"
    )
    for options, words in (
        (("--per-layer",), "--per-layer is without --engine: an engine shows no layer's output"),
        (("--engine-python", "/nowhere"), "/nowhere is no interpreter that this user can run"),
        (("--tokens", "3"), "3 tokens: give 4 or more, and fewer than 512"),
        (("--tp", "3"), "--tp 3"),
    ):
        code, found, _ = run("", *options)
        assert code == 2 and words in found["error"], found


def test_an_interpreter_is_for_an_engine(checkpoint: Callable[..., Path]) -> None:
    path = str(checkpoint("qwen2", hidden=32, layers=2, ffn=48))
    result = CliRunner().invoke(app, ["parity", path, "--engine-python", sys.executable])
    assert result.exit_code == 2 and "is for --engine vllm: give both or neither" in result.stderr
    result = CliRunner().invoke(app, ["parity", path, "--engine", "vllm"])
    assert result.exit_code == 2 and "vllm is not installed in this environment" in result.stderr
