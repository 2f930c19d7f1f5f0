"""Calls a loss in the form it was written for; knows both generations of the host's contract and
nothing of models.

Shapes: B rows, S positions, V this rank's slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.groups import Groups
from megatron_policy.interfaces import LossFunction, LossInputType
from megatron_policy.train.checks import candidates_key, check_metrics, loss_kind
from megatron_policy.train.logprobs import gather_vocab
from megatron_policy.train.microbatch import inside
from megatron_policy.train.output import Output

Metrics = dict[str, Any]


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
    """Valid sequences and tokens of the whole global batch, summed over the data-parallel `group`;
    see `own_counts`.
    """
    counts = own_counts(batch, device)
    dist.all_reduce(counts, group=group)
    return ValidCounts(sequences=counts[0], tokens=counts[1])


def own_counts(batch: BatchedDataDict, device: torch.device) -> torch.Tensor:
    """Valid sequences and tokens of this rank's rows, fp32 `[2]`.

    A token counts where `token_mask[:, 1:]` and its row's `sample_mask` are set: position 0
    predicts nothing. Without a `token_mask` every position within `input_lengths` counts.
    """
    sample_mask_B = batch["sample_mask"].to(device, torch.float32)
    if "token_mask" in batch:
        token_mask_BS = batch["token_mask"].to(device, torch.float32)
        tokens = (token_mask_BS[:, 1:] * sample_mask_B.unsqueeze(-1)).sum()
    else:
        tokens = (inside(batch).to(device, torch.float32) * sample_mask_B.unsqueeze(-1)).sum()
    return torch.stack([sample_mask_B.sum(), tokens])


def evaluate_loss(
    loss_fn: LossFunction, output: Output, counts: ValidCounts, vocab_size: int, groups: Groups
) -> tuple[torch.Tensor, Metrics]:
    """The loss's scalar and metrics for one microbatch, already divided by the global counts.

    A loss without `input_type` takes this rank's logits and the groups (the host up to 0.5). One
    with `input_type` takes what it names (the host from 0.6): `logprob` the fp32 next-token
    log-probabilities `[B, S - 1]`, and those of its `candidates`, for which no logits are held;
    `logit` the whole vocabulary's fp32 logits `[B, S, vocab_size]`. A loss that takes logits is
    called for each packed sequence.
    """
    # A batch without a valid sample is a step of zero gradients, not a division by zero.
    sequences, tokens = counts.sequences.clamp(min=1), counts.tokens.clamp(min=1)
    kind = loss_kind(loss_fn)
    if kind == LossInputType.LOGPROB.value:
        return loss_fn(
            data=output.microbatch.data,
            global_valid_seqs=sequences,
            global_valid_toks=tokens,
            **_scores(loss_fn, output),
        )
    calls = []
    for data, logits_BSV in output.logits():
        if kind is None:
            calls.append(
                loss_fn(
                    logits_BSV,
                    data,
                    sequences,
                    tokens,
                    vocab_parallel_rank=groups.tp.rank(),
                    vocab_parallel_group=groups.tp,
                    # The logits are those of all context-parallel ranks already.
                    context_parallel_group=groups.cp if groups.cp.size() == 1 else None,
                )
            )
        else:
            logits_BSV = gather_vocab(logits_BSV, groups.tp)[..., :vocab_size]
            calls.append(
                loss_fn(
                    data=data,
                    global_valid_seqs=sequences,
                    global_valid_toks=tokens,
                    logits=logits_BSV,
                )
            )
    return _added(calls)


def _scores(loss_fn: LossFunction, output: Output) -> dict[str, torch.Tensor | None]:
    data = output.microbatch.data
    everywhere = getattr(loss_fn, "reads_masked_positions", False)
    wanted_BS = inside(data) if everywhere else counted(data)
    with_entropy = getattr(loss_fn, "needs_entropy", False)
    found: dict[str, torch.Tensor | None] = {}
    key = candidates_key(loss_fn)
    if key is None:
        logprobs, entropy = output.next_token_scores(wanted_BS, with_entropy)
    else:
        candidates, logprobs, entropy = output.candidate_scores(data[key], wanted_BS, with_entropy)
        found["candidate_logprobs"] = candidates
    found["next_token_logprobs"] = logprobs
    return found | {"next_token_entropy": entropy} if with_entropy else found


def counted(data: BatchedDataDict) -> torch.Tensor:
    """Bool `[B, S]`: the tokens that count, by `sample_mask` and `token_mask`, if there is one."""
    rows_B1 = (data["sample_mask"] != 0).unsqueeze(-1)
    tokens_BS = data["token_mask"] != 0 if "token_mask" in data else inside(data)
    return tokens_BS & rows_B1


def _added(calls: Sequence[tuple[torch.Tensor, Metrics]]) -> tuple[torch.Tensor, Metrics]:
    """One call's result of those for the sequences of a microbatch."""
    if len(calls) == 1:
        return calls[0]
    metrics: Metrics = {}
    for _, found in calls:
        check_metrics(plain_metrics(found))
        for name, value in found.items():
            known = metrics.get(name)
            metrics[name] = value if known is None else _joined(name, known, value)
    return torch.stack([value for value, _ in calls]).sum(), metrics


def _joined(name: str, one: Any, other: Any) -> Any:
    if "_min" in name:
        return min(one, other)
    return max(one, other) if "_max" in name else one + other


def plain_metrics(metrics: Metrics) -> Metrics:
    """Metrics as Python numbers, so that they cross processes and pickle small."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in metrics.items()
    }
