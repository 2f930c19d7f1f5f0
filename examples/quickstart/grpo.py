"""The second phase, GRPO (Shao et al. 2024, "DeepSeekMath"): better answers than were ever shown.

Shapes: B rows, S positions; the G answers to one problem are in adjacent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_policy import BatchedDataDict, Policy

from .codec import Codec, with_masks
from .losses import GRPOLoss
from .rollouts import Rollouts
from .settings import GRPO
from .task import Question, Questions, reward

Report = Callable[[dict[str, float]], None]


def improve(
    policy: Policy,
    rollouts: Rollouts,
    problems: Questions,
    codec: Codec,
    settings: GRPO,
    report: Report,
) -> None:
    """Train for `settings.steps` steps on answers of `rollouts`, which follow the policy; `report`
    gets their metrics.
    """
    loss = GRPOLoss(settings.clip, settings.kl_weight)
    for step in range(1, settings.steps + 1):
        asked = problems.draw(settings.problems)
        answers = answer(rollouts, codec, [p for p in asked for _ in range(settings.group_size)])
        advantages_B = group_advantages(answers.rewards_B, settings.group_size)

        batch = answers.batch
        batch["advantages"] = advantages_B.unsqueeze(-1).expand_as(batch["input_ids"])
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        reference = policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
        result = policy.train(batch, loss)
        rollouts.follow()

        metrics = {"step": step, "reward": answers.rewards_B.mean().item(), **sums(result)}
        metrics |= result["rollout_mismatch"]
        if step % settings.measure_every == 0 or step == settings.steps:
            metrics["held_out_reward"] = measure(rollouts, codec, problems.held_out).reward
        report(metrics)


@dataclass(frozen=True)
class Answers:
    """One answer to each problem: the words, their rewards `[B]`, and the tokens to train on."""

    texts: list[str]
    rewards_B: Tensor
    batch: BatchedDataDict

    @property
    def reward(self) -> float:
        """The mean reward."""
        return self.rewards_B.mean().item()


def answer(rollouts: Rollouts, codec: Codec, problems: Sequence[Question]) -> Answers:
    """Sample an answer to each problem and check it."""
    prompts = codec.prompts(problems)
    generated = rollouts.generate(prompts)
    texts = codec.answers(generated, prompts["input_lengths"])
    rewards = [reward(problem, text) for problem, text in zip(problems, texts, strict=True)]
    whole = prompts | {
        "input_ids": generated["output_ids"],
        "input_lengths": generated["unpadded_sequence_lengths"],
        "generation_logprobs": generated["logprobs"],
    }
    batch = with_masks(BatchedDataDict(whole), prompts["input_lengths"])
    return Answers(texts, torch.tensor(rewards), batch)


def measure(
    rollouts: Rollouts, codec: Codec, held_out: Sequence[Question], times: int = 2
) -> Answers:
    """Answers to problems that are never trained on, each sampled `times` times."""
    return answer(rollouts, codec, list(held_out) * times)


def group_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """How much better each answer is than its group, in standard deviations of the group, `[B]`.

    A group whose answers are all equally good teaches nothing: 0.
    """
    rewards_NG = rewards_B.view(-1, group_size)
    mean_N1 = rewards_NG.mean(dim=1, keepdim=True)
    deviation_N1 = rewards_NG.std(dim=1, keepdim=True, unbiased=False)
    return ((rewards_NG - mean_N1) / (deviation_N1 + 1e-6)).flatten()


def sums(result: Mapping[str, Any]) -> dict[str, float]:
    """The loss's metrics over the call: each is the sum over microbatches."""
    metrics = result["microbatch_metrics"]
    totals = {name: sum(metrics[name]) for name in ("loss", "kl", "clipped")}
    return {**totals, "grad_norm": result["grad_norm"].item()}
