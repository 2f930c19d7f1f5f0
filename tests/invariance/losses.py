"""The losses of the table as users write them, and what each makes of the scores of whole rows,
which the oracle calls it.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.lm_head.logprobs import vocab_parallel_logprobs
from tests.losses import Result, loss_mask, sequence_nll, token_nll

CLIPPED_RATIO, DIVERGENCE_WEIGHT, ENTROPY_WEIGHT = (0.8, 1.28), 0.1, 0.5


class Scores(NamedTuple):
    """What the losses below are made of, `[B, S - 1]`; entropies only where they are asked for."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None


class TokenNLLOfLogprobs:
    """Second generation: given next-token log-probabilities, also of tokens that do not count,
    normalised by valid tokens.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    reads_masked_positions = True

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs) -> Any:
        return token_result(Scores(next_token_logprobs), data, global_valid_seqs, global_valid_toks)


class SequenceNLLOfLogits:
    """First generation: given this rank's logits and the groups, normalised by valid sequences."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(
        self,
        next_token_logits,
        data,
        global_valid_seqs,
        global_valid_toks,
        vocab_parallel_rank=None,
        vocab_parallel_group=None,
        context_parallel_group=None,
    ) -> Any:
        assert vocab_parallel_rank is not None and vocab_parallel_group is not None
        logprobs = vocab_parallel_logprobs(
            next_token_logits[:, :-1],
            data["input_ids"][:, 1:],
            vocab_parallel_rank * next_token_logits.size(-1),
            vocab_parallel_group,
        )
        return sequence_result(Scores(logprobs), data, global_valid_seqs, global_valid_toks)


class ClippedPolicyGradient:
    """Second generation: PPO's clipped ratio with an estimate of the divergence from a reference
    and a bonus for entropy, normalised by valid tokens. `data` hold `prev_logprobs`,
    `reference_logprobs` and `advantages` `[B, S]`.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_entropy = True

    def __call__(
        self, data, global_valid_seqs, global_valid_toks, next_token_logprobs, next_token_entropy
    ) -> Any:
        scores = Scores(next_token_logprobs, next_token_entropy)
        return policy_gradient_result(scores, data, global_valid_seqs, global_valid_toks)


class EntropyOfLogits:
    """Second generation: given the whole vocabulary's logits, normalised by valid tokens."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits) -> Any:
        all_logprobs = logits[:, :-1].log_softmax(-1)
        chosen = data["input_ids"][:, 1:].unsqueeze(-1)
        scores = Scores(
            all_logprobs.gather(-1, chosen).squeeze(-1),
            -(all_logprobs.exp() * all_logprobs).sum(-1),
        )
        return entropy_result(scores, data, global_valid_seqs, global_valid_toks)


def counts(data: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Valid sequences and tokens of a whole global batch."""
    return data["sample_mask"].sum(), loss_mask(data).sum()


def only_counted(scores: Scores, data: BatchedDataDict) -> Scores:
    """What a loss is given that does not ask for masked positions: 0 there."""
    counts_BS = loss_mask(data) > 0
    return Scores(*(None if each is None else each.where(counts_BS, 0.0) for each in scores))


def token_result(
    scores: Scores, data: BatchedDataDict, seqs: torch.Tensor, tokens: torch.Tensor
) -> Result:
    loss = token_nll(scores.logprobs, data, tokens)
    # Without a mask: whatever the loss is given beyond what it asked for would show.
    given = {"given": scores.logprobs.sum().item()}
    return loss, {"loss": loss.item(), "valid": loss_mask(data).sum(), **given, **sizes(data)}


def sequence_result(
    scores: Scores, data: BatchedDataDict, seqs: torch.Tensor, tokens: torch.Tensor
) -> Result:
    loss = sequence_nll(scores.logprobs, data, seqs)
    return loss, {"loss": loss.item(), "valid": data["sample_mask"].sum(), **sizes(data)}


def policy_gradient_result(
    scores: Scores, data: BatchedDataDict, seqs: torch.Tensor, tokens: torch.Tensor
) -> Result:
    assert scores.entropies is not None
    mask = loss_mask(data)
    ratio = (scores.logprobs - data["prev_logprobs"][:, 1:]).exp()
    clipped = ratio.clamp(*CLIPPED_RATIO)
    gain = data["advantages"][:, 1:]
    lost = torch.maximum(-gain * ratio, -gain * clipped)
    away = data["reference_logprobs"][:, 1:] - scores.logprobs
    divergence = ((away.exp() - away - 1) * mask).sum() / tokens
    entropy = (scores.entropies * mask).sum() / tokens
    loss = (lost * mask).sum() / tokens + DIVERGENCE_WEIGHT * divergence - ENTROPY_WEIGHT * entropy
    # A microbatch without a valid token has no extremum: infinities are none.
    counted = ratio.detach().where(mask > 0, torch.inf)
    metrics = {
        "loss": loss.item(),
        "kl": divergence.item(),
        "entropy": entropy.item(),
        "clipped": ((ratio != clipped) * mask).sum() / tokens,
        "ratio_min": counted.min(),
        "ratio_max": counted.where(mask > 0, -torch.inf).max().item(),
        "valid": mask.sum(),
        # Without the mask: what does not count is 0.
        "given": scores.logprobs.sum().item(),
        "given_entropy": scores.entropies.sum().item(),
    }
    return loss, metrics | sizes(data)


def entropy_result(
    scores: Scores, data: BatchedDataDict, seqs: torch.Tensor, tokens: torch.Tensor
) -> Result:
    assert scores.entropies is not None
    loss = (scores.entropies * loss_mask(data)).sum() / tokens
    surprise = -(scores.logprobs.detach() * loss_mask(data)).sum() / tokens
    return loss, {"loss": loss.item(), "surprise": surprise, **sizes(data)}


def sizes(data: BatchedDataDict) -> dict[str, Any]:
    """How large a microbatch is; over all of them the rows and tokens of the global batch."""
    return {"rows": data.size, "lengths": int(data["input_lengths"].sum())}
