"""The quickstart with a vLLM that samples, cut short: what it samples is what training computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import find_python

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "run.py"
TOLERANCE = 3e-5  # of a log-probability in fp32; a weight of the step before makes more than 1e-3


@pytest.mark.skipif(find_python() is None, reason="needs vLLM's CPU build: `make vllm-env`")
# With fewer steps of SFT no answer is right, and GRPO learns nothing.
def test_vllm_samples_with_the_weights_of_each_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sft-steps", "60", "--steps", "3", "--rollouts", "vllm"],
        cwd=tmp_path,
        env=os.environ | {"VLLM_PYTHON": str(find_python())},
        text=True,
        timeout=900,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    output = tmp_path / "outputs" / "quickstart"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "grpo"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["train_rollout_tokens"] > 256 and line["train_rollout_not_finite"] == 0
        assert line["train_rollout_logprob_abs_diff_max"] <= TOLERANCE, line
    assert len({line["kl"] for line in steps}) == 3  # the policy has moved between
    assert (output / "vllm.log").is_file()
