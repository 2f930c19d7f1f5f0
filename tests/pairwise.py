"""Losses of pairs of rows, the preferred one first, for every kind of input, and what they make of
Hugging Face's logits.

Shapes: B rows, S positions, V vocabulary, K candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces import LossInputType, LossType, MetricNormalizer
from megatron_policy.lm_head.logprobs import vocab_parallel_logprobs
from tests import oracle
from tests.losses import Result, loss_mask

BETA, TOKEN_OF_REWARD, SHARE_OF_IMITATION = 0.5, 7, 0.3
NAMES = ("loss", "accuracy", "preferred", "rejected", "pairs")
"""The metrics of every loss of this module."""


def make_pairs(pairs: int, length: int, vocab: int, candidates: int) -> BatchedDataDict:
    """Right-padded rows 2i and 2i + 1 of very different lengths, in every fourth pair with a
    `sample_mask` of 0, with the log-probabilities of a reference and candidates.
    """
    data = oracle.make_batch(2 * pairs, length, vocab, seed=8)
    random = torch.Generator().manual_seed(9)
    short_P = torch.randint(3, length // 2, (pairs,), generator=random)
    long_P = torch.randint(length // 2, length + 1, (pairs,), generator=random)
    first_P = torch.arange(pairs) % 3 == 0
    either = [torch.where(first_P, a, b) for a, b in ((long_P, short_P), (short_P, long_P))]
    lengths_B = torch.stack(either, dim=1).flatten()
    inside_BS = torch.arange(length) < lengths_B.unsqueeze(1)
    counts_P = (torch.arange(pairs) % 4 != 2).float()
    size = (2 * pairs, length)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, vocab, size, generator=random) * inside_BS,
            "input_lengths": lengths_B,
            "token_mask": data["token_mask"] * inside_BS | (torch.arange(length) == 1),
            "sample_mask": counts_P.repeat_interleave(2),
            "reference": -torch.rand(size, generator=random) * 3 - 4,
            "likely": torch.randint(0, vocab, (*size, candidates), generator=random),
        }
    )


def result_of_pairs(
    rewards_B: torch.Tensor, imitated_B: torch.Tensor, data: BatchedDataDict, seqs: torch.Tensor
) -> Result:
    """Bradley and Terry's loss of the rewards, and a share of the loss of imitating the first of
    each pair; divided by the pairs of the whole global batch.
    """
    preferred, rejected = rewards_B[::2], rewards_B[1::2]
    counts = data["sample_mask"][::2]
    pairs = seqs / 2
    each = -F.logsigmoid(BETA * (preferred - rejected)) + SHARE_OF_IMITATION * imitated_B[::2]
    loss = (each * counts).sum() / pairs
    metrics = {
        "loss": loss.detach(),
        "accuracy": ((preferred > rejected) * counts).sum() / pairs,
        "preferred": (preferred.detach() * counts).sum() / pairs,
        "rejected": (rejected.detach() * data["sample_mask"][1::2]).sum() / pairs,
        "pairs": counts.sum(),
    }
    return loss, metrics


def result_of_logprobs(logprobs_BS: torch.Tensor, data: BatchedDataDict, seqs: Any) -> Result:
    """Rewards are the sum of what the policy's log-probabilities are above the reference's."""
    mask_BS = loss_mask(data)
    above_BS = (logprobs_BS - data["reference"][:, 1:]) * mask_BS
    imitated_B = -(logprobs_BS * mask_BS).sum(-1) / mask_BS.sum(-1).clamp(min=1)
    return result_of_pairs(above_BS.sum(-1), imitated_B, data, seqs)


def result_of_candidates(
    candidates_BSK: torch.Tensor, entropy_BS: torch.Tensor, data: BatchedDataDict, seqs: Any
) -> Result:
    """Rewards are the candidates' log-probabilities, and entropy takes the place of imitation."""
    mask_BS = loss_mask(data)
    return result_of_pairs(
        (candidates_BSK.mean(-1) * mask_BS).sum(-1), (entropy_BS * mask_BS).sum(-1), data, seqs
    )


def result_of_logits(logits_BSV: torch.Tensor, data: BatchedDataDict, seqs: Any) -> Result:
    """Rewards are logits of one token after the last position, as a reward model's head has them;
    the first of a pair is to have small logits everywhere.
    """
    last_B = data["input_lengths"] - 1
    rewards_B = logits_BSV[torch.arange(data.size), last_B, TOKEN_OF_REWARD]
    sizes_BS = logits_BSV.square().mean(-1)[:, :-1]
    return result_of_pairs(5 * rewards_B, (sizes_BS * loss_mask(data)).sum(-1), data, seqs)


class PairsOfLogprobs:
    """Given next-token log-probabilities, as in DPO."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_group = 2
    metric_normalizations = {"pairs": MetricNormalizer.NONE}  # noqa: RUF012

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> Result:
        return result_of_logprobs(next_token_logprobs, data, global_valid_seqs)


class PairsOfCandidates:
    """Given the log-probabilities of candidates, and entropies."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB
    rows_per_group = 2
    candidates, needs_entropy = "likely", True

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
        candidate_logprobs: torch.Tensor,
        next_token_entropy: torch.Tensor,
    ) -> Result:
        return result_of_candidates(candidate_logprobs, next_token_entropy, data, global_valid_seqs)


class PairsOfLogits:
    """Given the whole vocabulary's logits, as a reward model's loss is."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    rows_per_group = 2

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        logits: torch.Tensor,
    ) -> Result:
        return result_of_logits(logits, data, global_valid_seqs)


class PairsOfSlices:
    """First generation: given this rank's slice of the logits and the groups."""

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_group = 2

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        vocab_parallel_rank: int,
        vocab_parallel_group: dist.ProcessGroup,
        context_parallel_group: dist.ProcessGroup | None = None,
    ) -> Result:
        logprobs_BS = vocab_parallel_logprobs(
            next_token_logits[:, :-1],
            data["input_ids"][:, 1:],
            vocab_parallel_rank * next_token_logits.size(-1),
            vocab_parallel_group,
        )
        return result_of_logprobs(logprobs_BS, data, global_valid_seqs)


LOSSES: dict[str, Any] = {
    "log-probabilities": PairsOfLogprobs,
    "candidates and entropies": PairsOfCandidates,
    "logits": PairsOfLogits,
    "slices of logits": PairsOfSlices,
}


def hf_result(kind: str, model: PreTrainedModel, data: BatchedDataDict) -> Result:
    """What one process makes of all rows at once."""
    logits_BSV = model(data["input_ids"]).logits.float()
    seqs = data["sample_mask"].sum()
    if kind == "logits":
        return result_of_logits(logits_BSV, data, seqs)
    all_BSV = logits_BSV[:, :-1].log_softmax(-1)
    if kind == "candidates and entropies":
        candidates_BSK = all_BSV.gather(-1, data["likely"][:, :-1])
        return result_of_candidates(candidates_BSK, -(all_BSV.exp() * all_BSV).sum(-1), data, seqs)
    logprobs_BS = all_BSV.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    return result_of_logprobs(logprobs_BS, data, seqs)
