"""The host's own scripts, as its users start them, with the laptop's configurations of
examples/nemo_rl as examples/nemo_rl/README.md and, for vLLM, docs/nemo-rl.md say, on two GPUs that
exist in Ray's books only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hosts.real.processes import ray_head
from tests.hosts.real.recipes import checkout
from tests.ranks import ROOT

LAPTOP = ROOT / "examples/nemo_rl/laptop"
LIMIT_S = 1200.0
GRPO_SCRIPTS = ("run_grpo.py", "run_grpo_math.py")
TOLERANCE = 1e-4
"""Of log-probabilities in fp32 by other kernels."""
LOGGED = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


@dataclass(frozen=True)
class Laptop:
    """A Ray instance, the tiny model with its data in `tiny`, and the host's tree."""

    tiny: Path
    host: Path
    env: dict[str, str]

    def run(self, name: str, file: str, out: Path, *arguments: str, engine: str = "") -> str:
        """Run a script of the host's to its end, with checkpoints and logs in `out`; with `engine`,
        that one of run.py stands in for vLLM on a GPU. Our worker replaces all of the host's. What
        it printed.
        """
        launcher = [str(LAPTOP / "run.py")] if engine else ["-m", "megatron_policy", "run"]
        where = [f"checkpointing.checkpoint_dir={out}", f"logger.log_dir={out}/logs"]
        config = ["--config", str(LAPTOP / file)]
        done = subprocess.run(
            [sys.executable, *launcher, f"examples/{name}", *config, *where, *arguments],
            cwd=self.host,
            env=self.env | {"MEGATRON_POLICY_WORKERS": "all", "LAPTOP_ENGINE": engine},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert "megatron_policy.hosts.nemo_rl.worker.MegatronPolicyWorker" in done.stdout
        return done.stdout

    def show(self, script: str, *arguments: object) -> str:
        """What another script of the laptop's prints."""
        command = [sys.executable, str(LAPTOP / script), *map(str, arguments)]
        return subprocess.check_output(command, env=self.env, text=True, timeout=LIMIT_S)

    def go_on(self, kind: str, file: str, out: Path, steps: int, **options: str) -> str:
        """Start a script again that has saved its third step; what it printed."""
        said = self.run(f"run_{kind}.py", file, out, f"{kind}.max_num_steps={steps}", **options)
        assert f"Step 4/{steps}" in said and f"Step 3/{steps}" not in said
        return said


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    tiny, host = tmp_path_factory.mktemp("tiny"), checkout()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(host)]),
        "NEMO_RL": str(host),
        "TINY": str(tiny),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("RAY_ADDRESS", None)
    prepare(tiny, env)
    with ray_head(env, tmp_path_factory.mktemp("r"), gpus=2, cpus=24) as address:
        yield Laptop(tiny, host, env | {"RAY_ADDRESS": address})


def prepare(tiny: Path, env: Mapping[str, str], *options: str) -> None:
    """Make the model and its data in `tiny`."""
    command = [sys.executable, "-m", "examples.nemo_rl.prepare", str(tiny), *options]
    # The host has a package `examples` too.
    alone = {**env, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=alone, check=True, timeout=LIMIT_S)


def saved(out: Path, kind: str = "policy") -> list[str]:
    """The steps that are complete, each with weights and the optimizer's state."""
    steps = sorted(out.glob("step_*"), key=lambda each: int(each.name.removeprefix("step_")))
    for step in steps:
        for part in ("weights", "optimizer"):
            assert list((step / kind / part).glob("iter_*")), f"{step} has no {part}"
    return [step.name for step in steps]


def printed(said: str, name: str) -> list[float]:
    """The values that a script has printed under a name, in order."""
    return [float(found) for found in re.findall(rf"{name}: (-?[\d.]+(?:e-?\d+)?|nan|inf)", said)]


def check_adapters_alone(step: Path) -> None:
    """The checkpoint holds adapters and no tensor of the model."""
    for part in ("weights", "optimizer"):
        (manifest,) = (step / "policy" / part).glob("iter_*/checkpoint.json")
        tensors = json.loads(manifest.read_text())["tensors"]
        assert tensors and all(".adapter." in name for name in tensors), tensors.keys()


def test_sft_runs_three_steps_saves_and_goes_on(laptop: Laptop, tmp_path: Path) -> None:
    laptop.run("run_sft.py", "sft.yaml", tmp_path)
    assert saved(tmp_path) == ["step_3"]
    laptop.go_on("sft", "sft.yaml", tmp_path, 5)
    assert saved(tmp_path)[-1] == "step_5"


def test_sft_trains_adapters_saves_them_alone_and_goes_on(laptop: Laptop, tmp_path: Path) -> None:
    losses = printed(laptop.run("run_sft.py", "sft_lora.yaml", tmp_path), "• Loss")
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] > 0
    assert saved(tmp_path) == ["step_3"]
    check_adapters_alone(tmp_path / "step_3")
    said = laptop.go_on("sft", "sft_lora.yaml", tmp_path, 5)
    assert all(0 < loss < losses[1] for loss in printed(said, "• Loss"))
    assert saved(tmp_path)[-1] == "step_5"


def test_sft_of_the_dtensor_configuration_has_the_losses_of_megatron_and_goes_on(
    laptop: Laptop, tmp_path: Path
) -> None:
    megatron, dtensor = tmp_path / "megatron", tmp_path / "dtensor"
    expected = printed(laptop.run("run_sft.py", "sft.yaml", megatron), "Loss")
    said = laptop.run("run_sft.py", "sft_dtensor.yaml", dtensor)
    assert "DTensorPolicyWorker" in said
    losses = printed(said, "Loss")
    # Printed with four digits.
    assert len(losses) == 3 and losses == pytest.approx(expected, abs=1.01e-4)
    assert saved(dtensor) == ["step_3"]
    laptop.go_on("sft", "sft_dtensor.yaml", dtensor, 4)


def test_dpo_runs_three_steps_and_saves(laptop: Laptop, tmp_path: Path) -> None:
    laptop.run("run_dpo.py", "dpo.yaml", tmp_path)
    assert saved(tmp_path) == ["step_3"]


def test_a_reward_model_learns_to_tell_answers_it_has_not_seen(
    laptop: Laptop, tmp_path: Path
) -> None:
    said = laptop.run("run_rm.py", "rm.yaml", tmp_path)
    losses = printed(said, "• loss")
    assert len(losses) == 10 and all(0 < loss < losses[0] for loss in losses[1:])
    assert printed(said, "Validation accuracy")[-1] >= 0.9
    assert saved(tmp_path) == ["step_10"]


def script_for_grpo() -> str:
    """Its name in this release."""
    return next(name for name in GRPO_SCRIPTS if (checkout() / "examples" / name).exists())


def test_grpo_runs_three_steps_with_rollouts_of_the_policy(laptop: Laptop, tmp_path: Path) -> None:
    said = laptop.run(script_for_grpo(), "grpo.yaml", tmp_path)
    # Newer hosts catch what a worker raises, and train on no answers.
    assert "Error generating response" not in said
    assert saved(tmp_path) == ["step_3"]
    check_rollouts(tmp_path, laptop.tiny / "model", steps=3)


def test_grpo_trains_adapters_and_gives_the_engine_merged_weights(
    laptop: Laptop, tmp_path: Path
) -> None:
    laptop.run(script_for_grpo(), "grpo_lora.yaml", tmp_path, engine="transformers")
    assert saved(tmp_path) == ["step_3"]
    check_adapters_alone(tmp_path / "step_3")
    check_rollouts(tmp_path, laptop.tiny / "model", steps=3)


def test_grpo_of_the_dtensor_configuration_gives_the_engine_its_weights(
    laptop: Laptop, tmp_path: Path
) -> None:
    said = laptop.run(script_for_grpo(), "grpo_dtensor.yaml", tmp_path, engine="transformers")
    assert "DTensorPolicyWorker" in said
    assert saved(tmp_path) == ["step_3"]
    check_rollouts(tmp_path, laptop.tiny / "model", steps=3)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's CPU build is not installed")
def test_grpo_learns_sums_from_vllm_which_has_the_weights_of_every_step(
    laptop: Laptop, tmp_path: Path
) -> None:
    tiny = tmp_path / "tiny"
    prepare(tiny, laptop.env, "--steps", "150")
    laptop = replace(laptop, tiny=tiny, env=laptop.env | {"TINY": str(tiny)})
    said = laptop.run(script_for_grpo(), "grpo_vllm.yaml", tmp_path, engine="vllm")
    # Two engines, before each step and before the last validation.
    held = [int(found) for found in re.findall(r"vLLM has the weights of step (\d+)", said)]
    assert sorted(held) == sorted([*range(41)] * 2)
    assert saved(tmp_path)[-1] == "step_40"
    check_rollouts(tmp_path, laptop.tiny / "model", steps=4, rows=128)
    table = [
        [float(value) for value in line.split()]
        for line in laptop.show("curve.py", tmp_path / "logs").splitlines()[1:]
    ]
    steps, rewards, errors, *_ = zip(*table, strict=True)
    assert list(steps) == list(range(1, 41))
    assert all(1 <= error < 1 + TOLERANCE for error in errors)
    assert sum(rewards[-10:]) > 1.5 * sum(rewards[:10]) > 0


def check_rollouts(out: Path, base: Path, steps: int, rows: int = 16) -> None:
    """What generated has computed with the policy's weights of its step, and the policy learns: the
    model that it started from assigns other log-probabilities from the second step on.
    """
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    moved = []
    for step in range(1, steps + 1):
        (file,) = out.glob(f"logs/**/train_data_step{step}.jsonl")
        logged = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(logged) == rows
        farthest = 0.0
        for row in logged:
            # Values stand in lists of one row.
            held = {key: torch.tensor(row[key]) for key in LOGGED}
            mask_S = held["token_loss_mask"][0].bool()
            assert mask_S.any()
            generated, read = held["generation_logprobs"][0], held["prev_logprobs"][0]
            torch.testing.assert_close(generated[mask_S], read[mask_S], atol=TOLERANCE, rtol=0)
            started = logprobs_of(model, held["token_ids"])
            farthest = max(farthest, (started - read)[mask_S].abs().max().item())
        moved.append(farthest)
    assert moved[0] < TOLERANCE and all(each > 100 * TOLERANCE for each in moved[1:]), moved


@torch.no_grad()
def logprobs_of(model: Any, ids_1S: torch.Tensor) -> torch.Tensor:
    scores_SV = model(input_ids=ids_1S).logits[0, :-1].log_softmax(-1)
    return torch.nn.functional.pad(scores_SV.gather(-1, ids_1S[0, 1:, None]).squeeze(-1), (1, 0))


def test_ppo_trains_a_policy_and_its_value_model_and_goes_on(
    laptop: Laptop, tmp_path: Path
) -> None:
    if not (checkout() / "examples/run_ppo.py").exists():
        pytest.skip("this NeMo RL has no PPO")
    said = laptop.run("run_ppo.py", "ppo.yaml", tmp_path, engine="transformers")
    assert "megatron_policy.hosts.nemo_rl.value_worker.MegatronValueWorker" in said
    losses = printed(said, "Value loss")
    assert len(losses) == 6 and all(0 <= loss < losses[0] for loss in losses[1:])
    assert len(printed(said, "Policy loss")) == 6
    errors = printed(said, "Generation KL Error")
    assert len(errors) == 3 and all(abs(error) < 1e-6 for error in errors)
    assert saved(tmp_path) == saved(tmp_path, "value") == ["step_3"]
    said = laptop.go_on("ppo", "ppo.yaml", tmp_path, 4, engine="transformers")
    assert all(0 <= loss < losses[0] for loss in printed(said, "Value loss"))
    assert saved(tmp_path, "value")[-1] == "step_4"
