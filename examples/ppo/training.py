"""The three phases: imitation, a reward model of preferences, and PPO.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from megatron_policy import BatchedDataDict, Policy, RayVirtualCluster
from megatron_policy.workers import init_ray
from quickstart.checkpoint import make_checkpoint
from quickstart.codec import Codec
from quickstart.demo import tokenizer_of
from quickstart.grpo import Answers, answer, measure
from quickstart.losses import GRPOLoss, ImitationLoss
from quickstart.settings import Imitation, Layout, policy_section
from quickstart.task import Problem, Problems

from .advantages import estimated, normalised, token_rewards
from .losses import PreferenceLoss, ValueLoss

ROWS = 128
"""Of a global batch, in every phase."""
KL_WEIGHT, DISCOUNT, SMOOTHING, EPOCHS = 0.02, 1.0, 0.95, 2
RATES = {"sft": 3e-3, "reward": 1e-3, "policy": 5e-4, "value": 1e-3}
TYPES = {"reward": "bradley_terry", "value": "regression"}
"""Of the scalar heads: one number for a sequence, or one for every token."""


@dataclass(frozen=True)
class Run:
    """Where checkpoints go, the problems, and their tokens."""

    output: Path
    problems: Problems
    codec: Codec
    seed: int

    @classmethod
    def new(cls, output: Path, seed: int) -> Run:
        """A run that starts from a new model with random weights."""
        problems = Problems(seed)
        texts = [problem.prompt + problem.answer for problem in problems.held_out]
        path = make_checkpoint(output / "start", texts, seed)
        return cls(output, problems, Codec(tokenizer_of(str(path))), seed)

    def imitate(self, steps: int) -> float:
        """Learn careless demonstrations; returns the reward on held-out problems."""
        with self.model("sft", self.output / "start", steps) as policy:
            for _ in range(0, steps, 10):
                shown = self.problems.draw(10 * ROWS)
                told = [self.problems.demonstrate(each) for each in shown]
                policy.train(self.codec.demonstrations(shown, told), ImitationLoss())
            policy.export_hf(self.output / "sft", overwrite=True)
            return measure(policy, self.codec, self.problems.held_out).reward

    def learn_preferences(self, steps: int) -> float:
        """Train the reward model; returns the share of held-out pairs that it ranks right."""
        with self.model("reward", self.output / "sft", steps) as reward:
            for _ in range(steps):
                reward.train(self._pairs(self.problems.draw(ROWS // 2)), PreferenceLoss())
            reward.export_hf(self.output / "reward", overwrite=True)
            scores_B = reward.score(self._pairs(self.problems.held_out))["scores"]
            return (scores_B[::2] > scores_B[1::2]).float().mean().item()

    def improve(self, steps: int) -> float:
        """PPO against the reward model; returns the reward on held-out problems."""
        sft, judge = self.output / "sft", self.output / "reward"
        with (
            self.model("policy", sft, steps * EPOCHS, reference=True) as policy,
            self.model("value", sft, steps * EPOCHS) as value,
            self.model("reward", judge, 1, train=False) as reward,
        ):
            for step in range(1, steps + 1):
                answers = answer(policy, self.codec, self.problems.draw(ROWS))
                self._step(policy, value, reward, answers)
                if step % 10 == 0:
                    print(f"step {step:3d}  reward {answers.reward:.3f}", flush=True)
            policy.export_hf(self.output / "policy", overwrite=True)
            return measure(policy, self.codec, self.problems.held_out).reward

    def _step(self, policy: Policy, value: Policy, reward: Policy, answers: Answers) -> None:
        batch = answers.batch
        mask_BS = batch["token_mask"]
        logprobs_BS = policy.get_logprobs(batch)["logprobs"]
        reference_BS = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        values_BS = value.get_values(batch)["values"]
        scores_B = reward.score(batch)["scores"]
        scores_B = (scores_B - scores_B.mean()) / (scores_B.std() + 1e-6)
        rewards_BS = token_rewards(scores_B, logprobs_BS, reference_BS, mask_BS, KL_WEIGHT)
        advantages_BS, returns_BS = estimated(rewards_BS, values_BS, mask_BS, DISCOUNT, SMOOTHING)
        batch["advantages"] = normalised(advantages_BS, mask_BS)
        batch["prev_logprobs"] = logprobs_BS
        batch["reference_policy_logprobs"] = reference_BS
        # A value stands one position before the token that it is about.
        batch["returns"] = torch.nn.functional.pad(returns_BS[:, 1:], (0, 1))
        batch["value_mask"] = torch.nn.functional.pad(mask_BS[:, 1:], (0, 1))
        for _ in range(EPOCHS):
            value.train(batch, ValueLoss())
            # Clipped as in PPO (Schulman et al. 2017); the penalty is part of the rewards.
            policy.train(batch, GRPOLoss(kl_weight=0.0))

    def _pairs(self, problems: list[Problem] | tuple[Problem, ...]) -> BatchedDataDict:
        """A right answer to each problem, and after it a wrong one."""
        asked = [problem for problem in problems for _ in range(2)]
        texts = [text for problem in problems for text in (problem.answer, self._wrong(problem))]
        return self.codec.demonstrations(asked, texts)

    def _wrong(self, problem: Problem) -> str:
        while (text := self.problems.demonstrate(problem)) == problem.answer:
            if len(set(problem.letters)) == 1:
                return problem.answer.removesuffix(problem.letters[-1])
        return text

    @contextmanager
    def model(
        self, role: str, start: Path, calls: int, *, reference: bool = False, train: bool = True
    ) -> Iterator[Policy]:
        """A model of this run on a worker of its own; shut down afterwards."""
        settings = Imitation(batch_size=ROWS, learning_rate=RATES[role])
        lengths = self.codec.lengths(self.problems.held_out)
        section: dict[str, Any] = policy_section(
            str(start), settings, calls, Layout(1, 1), lengths, 128, self.seed
        )
        if role in TYPES:
            section["reward_model_cfg"] = {"enabled": True, "reward_model_type": TYPES[role]}
            section["hf_config_overrides"] = {"pad_token_id": self.codec.tokenizer.pad_token_id}
        cluster = RayVirtualCluster([1], use_gpus=False)
        try:
            policy = Policy(
                cluster,
                section,
                self.codec.tokenizer,
                init_optimizer=train,
                init_reference_model=reference,
            )
            try:
                yield policy
            finally:
                policy.shutdown()
        finally:
            cluster.shutdown()


@contextmanager
def ray_on_this_machine(workers: int) -> Iterator[None]:
    """Ray with room for that many workers, however many cores there are."""
    init_ray(num_cpus=workers, object_store_bytes=200 * 2**20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
