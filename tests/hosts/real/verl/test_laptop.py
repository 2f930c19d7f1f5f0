"""The command of examples/verl/README.md, shortened: verl's SFT and GRPO trainers from beginning to
end, with our engine and with rollouts by transformers.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.verl import laptop
from tests.hosts.real.processes import run_to_its_end
from tests.hosts.real.verl.trainers import logged

STEPS = 2
GRADED = """
def compute_score(data_source, solution_str, ground_truth, **_):
    found, wanted = solution_str.split(), ground_truth.split()
    return sum(a == b for a, b in zip(found, wanted)) / len(wanted)
"""
"""A reward that tells responses apart of a model that is never right yet."""
LIMIT_S = 1200.0
LOGPROB_TOLERANCE = 1e-5
"""Of probabilities in fp32, as everywhere else."""


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    inherited = laptop.environment()
    # Ray of its own, as a laptop starts it.
    inherited.pop("RAY_ADDRESS", None)
    return inherited | {
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.fixture(scope="module")
def start(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which SFT has exported a model."""
    output = tmp_path_factory.mktemp("laptop")
    sft_start(output, environment)
    return output


def sft_start(output: Path, environment: Mapping[str, str]) -> None:
    """Make data and a model in a folder, and let SFT export one after a few steps."""
    laptop.prepare(output)
    command = [*laptop.sft(output), "trainer.total_training_steps=10"]
    ended = run_to_its_end(command, environment, output, LIMIT_S)
    assert ended.code == 0, ended.said[-4000:]


def run_grpo(
    output: Path, environment: Mapping[str, str], steps: int, resume: str, *overrides: str
) -> list[dict[str, Any]]:
    """The metrics that verl logs in a run of GRPO up to a step."""
    log, reward = output / f"{steps}.jsonl", output / "reward.py"
    reward.write_text(GRADED)
    command = [
        *laptop.grpo(output),
        *(f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.save_freq=1"),
        *("trainer.val_before_train=False", "trainer.logger=[console,file]"),
        *(f"reward.custom_reward_function.path={reward}", f"trainer.resume_mode={resume}"),
        *overrides,
    ]
    own = {"VERL_FILE_LOGGER_PATH": str(log)}
    ended = run_to_its_end(command, {**environment, **own}, output, LIMIT_S)
    assert ended.code == 0, ended.said[-4000:]
    log.rename(output / "log.jsonl")
    return logged(output)


def test_rollouts_have_the_log_probabilities_of_the_engine_after_every_update(
    start: Path, environment: Mapping[str, str]
) -> None:
    found = run_grpo(start, environment, STEPS, "disable")
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    for step in found:
        assert step["training/rollout_probs_diff_max"] <= LOGPROB_TOLERANCE
        assert step["actor/grad_norm"] > 0 and step["actor/entropy"] > 0
    # The reference is where the actor began.
    assert found[0]["actor/kl_loss"] < LOGPROB_TOLERANCE < found[1]["actor/kl_loss"]
    after = run_grpo(start, environment, STEPS + 1, "auto")
    assert [each["step"] for each in after] == [STEPS + 1]
    assert after[0]["training/rollout_probs_diff_max"] <= LOGPROB_TOLERANCE
    assert after[0]["actor/kl_loss"] > LOGPROB_TOLERANCE


def test_grpo_says_what_it_starts_from(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `sft` first"):
        laptop.grpo(tmp_path)
    script = Path(laptop.__file__)
    ended = subprocess.run(
        [laptop.sys.executable, str(script), "grpo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 1 and "run `sft` first" in ended.stderr
