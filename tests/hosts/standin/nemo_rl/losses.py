"""Losses under both of the host's contracts: the mean negative log-likelihood of tokens and, for
data with advantages, the clipped policy gradient.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"


class Normalizer(enum.Enum):
    NONE = "none"


class Sum(torch.autograd.Function):
    """The sum over a group of what its ranks go on to compute alike."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class LogitLoss:
    """Is given this rank's logits, and the group over which the vocabulary is split."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert vocab_parallel_rank is not None and vocab_parallel_group is not None
        logits = next_token_logits[:, :-1]
        targets = data["input_ids"][:, 1:] - vocab_parallel_rank * logits.size(-1)
        inside = (targets >= 0) & (targets < logits.size(-1))
        own = logits.gather(-1, torch.where(inside, targets, 0).unsqueeze(-1)).squeeze(-1)
        total = Sum.apply(logits.exp().sum(-1), vocab_parallel_group)
        chosen = Sum.apply(torch.where(inside, own, 0), vocab_parallel_group)
        return _mean(chosen - total.log(), data, global_valid_toks)


class LogprobLoss:
    """Says what it wants, and is given it by keyword."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    metric_normalizations: ClassVar = {"num_valid_samples": Normalizer.NONE}

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return _mean(next_token_logprobs, data, global_valid_toks)


def _mean(
    logprobs: torch.Tensor, data: BatchedDataDict, tokens: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    assert isinstance(data, BatchedDataDict), type(data)
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    gained = logprobs
    if "advantages" in data:
        ratio = (logprobs - data["prev_logprobs"][:, 1:]).exp()
        advantages = data["advantages"][:, 1:]
        gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(gained * mask).sum() / tokens
    return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}
