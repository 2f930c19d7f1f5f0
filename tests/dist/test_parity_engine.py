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

assert sys.argv[1:] == ["-m", "megatron_policy.inference.vllm.process"], sys.argv
assert (Path(os.environ["PYTHONPATH"]) / "megatron_policy" / "cli").is_dir()
fault = {fault!r}
torch.set_num_threads(1)


def logits_of(rows):
    with torch.no_grad():
        return model(rows, use_cache=False).logits.float()


def said(rows, temperature):
    found = (logits_of(rows)[:, :-1] / temperature).log_softmax(-1)
    return found.gather(-1, rows[:, 1:, None])[..., 0].tolist()


for line in sys.stdin:
    asked = json.loads(line)
    method, given, value = asked["method"], asked["arguments"], None
    if method == "start":
        if fault == "refuse":
            print(json.dumps({{"failed": "ValueError: no kernel"}}), flush=True)
            continue
        if fault == "die":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        options = given["options"]
        torch.manual_seed(options["seed"])
        dtype = getattr(torch, options["dtype"])
        model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype).eval()
        if fault == "head":
            model.lm_head.weight.data[77, 5] += 0.5
        if fault == "embedding":
            model.model.embed_tokens.weight.data *= 1.5
    elif method == "sample":
        rows = torch.tensor(given["prompts"])
        start, sampling = rows.shape[1], given["sampling"]
        assert sampling["temperature"] == 1.0 and sampling["ignore_eos"], sampling
        for _ in range(sampling["max_tokens"]):
            best = torch.multinomial(logits_of(rows)[:, -1].softmax(-1), 1)
            rows = torch.cat([rows, best], 1)
        drawn = said(rows, 0.7 if fault == "temperature" else 1.0)
        value = [(row[start:], own[start - 1 :]) for row, own in zip(rows.tolist(), drawn)]
    elif method == "logprobs":
        value = said(torch.tensor(given["rows"]), 1.0)
    else:
        ids = [2] + given["text"].count("a") * [9]
        value = {{"version": "0", "defaults": {{"top_p": 0.8}}, "text_ids": ids}}
    print(json.dumps({{"value": value}}), flush=True)
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
        "the engine's process has ended with code 3; its last words: out of luck"
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
