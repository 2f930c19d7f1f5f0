"""`megatron-policy parity --engine vllm` passes on equal weights, and reports one changed element
of the head that the engine serves, with its token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_policy.cli import app
from tests.vllm.engines import find_python

SIZES = {"hidden": 128, "layers": 2}


@pytest.fixture(autouse=True)
def _needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_python() is None:
        pytest.skip("needs vLLM's CPU build: `make vllm-env`, or VLLM_PYTHON=/its/python")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(path: Path, *options: str) -> tuple[int, Any, str]:
    common = ["--engine", "vllm", "--engine-python", str(find_python()), "--tokens", "64"]
    result = CliRunner().invoke(app, ["parity", str(path), *common, *options])
    return result.exit_code, result.stdout, result.stderr


def changed(path: Path, folder: Path, row: int, by: float) -> Path:
    """A copy with another element in one row of the head."""
    shutil.copytree(path, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"][row, 5] += by
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_changed_element_of_the_head(
    checkpoint: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    path = checkpoint("qwen2", **SIZES, dtype=dtype)
    other = changed(path, tmp_path / "other", row=77, by=0.5 if dtype == "float32" else 4.0)
    code, said, _ = run(path, "--dtype", dtype, "--reference", str(other), "--json")
    found = json.loads(said)
    print(found)
    assert code == 1 and not found["holds"]
    assert found["prompts"]["worst"][0]["token"] == 77
    assert found["causes"][0].startswith("the head's row of token 77: its log-probabilities are")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_weights(checkpoint: Callable[..., Path], dtype: str) -> None:
    path = checkpoint("qwen2", **SIZES, dtype=dtype)
    layout = ("--tp", "2") if dtype == "float32" else ()
    code, said, error = run(path, "--dtype", dtype, *layout)
    print(said)
    assert code == 0, error
    assert "its own samples" in said and "beyond" not in said
