"""Losses in both generations of the host's contract, as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.lm_head.logprobs import vocab_parallel_logprobs

Result = tuple[torch.Tensor, dict[str, Any]]


def loss_mask(data: BatchedDataDict) -> torch.Tensor:
    return data["token_mask"][:, 1:].float() * data["sample_mask"].unsqueeze(-1)


def token_nll(logprobs: torch.Tensor, data: BatchedDataDict, tokens: torch.Tensor) -> torch.Tensor:
    return -(logprobs * loss_mask(data)).sum() / tokens


def sequence_nll(logprobs: torch.Tensor, data: BatchedDataDict, seqs: torch.Tensor) -> torch.Tensor:
    mask = loss_mask(data)
    means = (logprobs * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -(means * data["sample_mask"]).sum() / seqs


class TokenNLL:
    """First generation: given this rank's logits and the groups, normalised by valid tokens."""

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
    ) -> Result:
        assert vocab_parallel_rank is not None and vocab_parallel_group is not None
        logprobs = vocab_parallel_logprobs(
            next_token_logits[:, :-1],
            data["input_ids"][:, 1:],
            vocab_parallel_rank * next_token_logits.size(-1),
            vocab_parallel_group,
        )
        loss = token_nll(logprobs, data, global_valid_toks)
        return loss, {"loss": loss.item(), "valid": loss_mask(data).sum()}


class SequenceNLL:
    """Second generation: given next-token log-probabilities, normalised by valid sequences."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> Result:
        loss = sequence_nll(next_token_logprobs, data, global_valid_seqs)
        return loss, {"loss": loss.item(), "valid": data["sample_mask"].sum()}


class LogitEntropy:
    """Second generation: given the whole vocabulary's logits; rewards certainty at the masked
    positions.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        logits: torch.Tensor,
    ) -> Result:
        logprobs = logits[:, :-1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = (entropy * loss_mask(data)).sum() / global_valid_toks
        return loss, {"loss": loss.item()}
