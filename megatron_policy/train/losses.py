"""Calls a loss in the form it was written for; knows both generations of the host's contract and
nothing of models.

Shapes: B rows, S positions, V this rank's slice of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.groups import Groups
from megatron_policy.interfaces import LossFunction, LossInputType
from megatron_policy.train.logprobs import gather_vocab, next_token_logprobs


@dataclass(frozen=True)
class ValidCounts:
    """What a global batch is normalised by: valid sequences and valid next-token positions, 0-d
    fp32 tensors.
    """

    sequences: torch.Tensor
    tokens: torch.Tensor


def count_valid(
    batch: BatchedDataDict, group: dist.ProcessGroup, device: torch.device
) -> ValidCounts:
    """Valid sequences and tokens of the whole global batch, summed over the data-parallel `group`.

    A token counts where `token_mask[:, 1:]` and its row's `sample_mask` are set: position 0
    predicts nothing. Without a `token_mask` every position counts.
    """
    sample_mask_B = batch["sample_mask"].to(device, torch.float32)
    if "token_mask" in batch:
        token_mask_BS = batch["token_mask"].to(device, torch.float32)
        tokens = (token_mask_BS[:, 1:] * sample_mask_B.unsqueeze(-1)).sum()
    else:
        tokens = sample_mask_B.sum() * batch["input_ids"].size(1)
    counts = torch.stack([sample_mask_B.sum(), tokens])
    dist.all_reduce(counts, group=group)
    return ValidCounts(sequences=counts[0], tokens=counts[1])


def evaluate_loss(
    loss_fn: LossFunction,
    logits_BSV: torch.Tensor,
    data: BatchedDataDict,
    counts: ValidCounts,
    vocab_size: int,
    vocab_start: int,
    groups: Groups,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss's scalar and metrics for one microbatch, already divided by the global counts.

    A loss without `input_type` takes this rank's logits and the groups (the host up to 0.5). One
    with `input_type` takes what it names (the host from 0.6): `logprob` the fp32 next-token
    log-probabilities `[B, S - 1]`, `logit` the whole vocabulary's fp32 logits `[B, S, vocab_size]`.
    """
    # A batch without a valid sample is a step of zero gradients, not a division by zero.
    sequences, tokens = counts.sequences.clamp(min=1), counts.tokens.clamp(min=1)
    if not hasattr(loss_fn, "input_type"):
        return loss_fn(
            logits_BSV,
            data,
            sequences,
            tokens,
            vocab_parallel_rank=groups.tp.rank(),
            vocab_parallel_group=groups.tp,
            context_parallel_group=groups.cp,
        )
    return loss_fn(
        data=data,
        global_valid_seqs=sequences,
        global_valid_toks=tokens,
        **_loss_input(loss_fn, logits_BSV, data, vocab_size, vocab_start, groups),
    )


def _loss_input(
    loss_fn: LossFunction,
    logits_BSV: torch.Tensor,
    data: BatchedDataDict,
    vocab_size: int,
    vocab_start: int,
    groups: Groups,
) -> dict[str, torch.Tensor]:
    # A host brings an enumeration of its own: compare values, not members.
    kind = getattr(loss_fn.input_type, "value", loss_fn.input_type)
    if kind == LossInputType.LOGPROB.value:
        logprobs = next_token_logprobs(logits_BSV, data["input_ids"], vocab_start, groups.tp)
        return {"next_token_logprobs": logprobs}
    if kind == LossInputType.LOGIT.value:
        return {"logits": gather_vocab(logits_BSV, groups.tp)[..., :vocab_size]}
    raise NotImplementedError(
        f"{type(loss_fn).__name__}.input_type is {kind!r}; this policy feeds "
        "'logprob' and 'logit' losses. Distillation is not built yet."
    )
