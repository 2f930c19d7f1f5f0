"""verl's rollouts by vLLM's CPU build, where that is installed beside verl: what its workers
compute with after verl has sent weights, and GRPO from beginning to end as examples/verl/README.md
has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.verl import laptop
from tests.hosts.real.processes import run_to_its_end
from tests.hosts.real.verl.test_laptop import LOGPROB_TOLERANCE, run_grpo, sft_start

LIMIT_S = 1200.0
STEPS = 3
TOLERANCE = 3e-5
"""Of log-probabilities in fp32 by other kernels; a stale tensor makes more than 1e-2."""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's CPU build is not installed"),
]


MODEL = "actor_rollout_ref.model"
ADAPTED = (
    f"{MODEL}.lora.rank=8",
    f"{MODEL}.lora.alpha=16",
    "actor_rollout_ref.actor.optim.lr=5e-3",
)
OVERRIDES = {
    "a server for each rank": (),
    "adapters alone": (*ADAPTED, f"{MODEL}.lora.merge=False"),
    "merged adapters": (*ADAPTED, f"{MODEL}.lora.merge=True"),
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    inherited = laptop.environment("cpu_vllm")
    # Ray of its own, as a laptop starts it.
    inherited.pop("RAY_ADDRESS", None)
    return inherited | {
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def told(kind: str, model: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What `sent_to_vllm` has found."""
    script = "tests.hosts.real.verl.sent_to_vllm"
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", script, kind, str(model), str(folder)]
    ended = run_to_its_end(command, environment | alone, folder, LIMIT_S)
    assert ended.code == 0, ended.said[-4000:]
    (line,) = [each for each in ended.said.splitlines() if each.startswith("found ")]
    found: dict[str, Any] = json.loads(line.removeprefix("found "))
    return found


@pytest.mark.parametrize(("family", "tied"), [("qwen3_moe", False), ("qwen2", True)])
def test_a_worker_computes_with_what_verl_has_sent_and_refuses_incomplete_sets(
    family: str,
    tied: bool,
    checkpoint: Callable[..., Path],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    model = checkpoint(family, hidden=128, layers=2, tied=tied)
    found = told("whole", model, tmp_path, environment)
    assert found["of no weights"] > 1e-2 and found["apart"] > 1e-2
    for name in ("first", "second", "after"):
        assert found[name] <= TOLERANCE, found
    assert found["incomplete"].startswith("RefitError: vLLM has loaded nothing into"), found
    assert found["unknown"], found


def test_a_worker_computes_with_the_base_then_with_adapters_and_refuses_those_it_has_no_layer_for(
    checkpoint: Callable[..., Path], environment: dict[str, str], tmp_path: Path
) -> None:
    model = checkpoint("qwen2", hidden=128, layers=2, tied=True)
    found = told("adapters", model, tmp_path, environment)
    assert found["of no weights"] > 1e-2 and found["apart"] > 1e-2
    for name in ("base", "first", "second", "after"):
        assert found[name] <= TOLERANCE, found
    assert "has no layers for adapters of model.layers.0.self_attn.nothing" in found["unknown"]
    assert "vLLM refuses the adapters, and has none now" in found["too large"]


@pytest.fixture(scope="module")
def start(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which SFT has exported a model."""
    output = tmp_path_factory.mktemp("laptop")
    sft_start(output, environment)
    return output


@pytest.mark.parametrize("rollouts", OVERRIDES)
def test_rollouts_have_the_log_probabilities_of_the_engine_after_every_update(
    rollouts: str, start: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    overrides = (*laptop.with_vllm(), *OVERRIDES[rollouts], f"trainer.default_local_dir={tmp_path}")
    found = run_grpo(start, environment, STEPS, "disable", *overrides)
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    for step in found:
        assert step["training/rollout_probs_diff_max"] <= LOGPROB_TOLERANCE
        assert step["actor/grad_norm"] > 0 and step["actor/entropy"] > 0
    # Servers start without weights, and the policy moves: what they compute with moves too.
    moved = [each["actor/kl_loss"] for each in found]
    assert moved[0] < LOGPROB_TOLERANCE < moved[1] < moved[2]
