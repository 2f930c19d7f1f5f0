"""Log-probabilities from logits whose vocabulary is split between ranks.

Shapes: B rows, S positions, V this rank's slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.parallel.groups import exchange, take_part

CHUNK = 1024
"""Positions whose softmax is held at a time."""
_GATHERED = 2**24
"""Logits that are gathered at a time."""


def vocab_parallel_logprobs(
    logits_BSV: torch.Tensor,
    targets_BS: torch.Tensor,
    vocab_start: int,
    group: dist.ProcessGroup,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """`log softmax(logits)[target]` as fp32 `[B, S]`, differentiable in the logits.

    `logits_BSV` is this rank's fp32 slice `[vocab_start, vocab_start + V)`; every rank of `group`
    gets the result. Besides the logits, and their gradient in the backward pass, at most
    `chunk * V` elements are held.
    """
    apply: Callable[..., torch.Tensor] = _VocabParallelLogprob.apply
    return apply(logits_BSV, targets_BS, vocab_start, group, chunk)


class _VocabParallelLogprob(torch.autograd.Function):
    """Saves the logits and one normaliser per position; backward recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BSV: torch.Tensor,
        targets_BS: torch.Tensor,
        vocab_start: int,
        group: dist.ProcessGroup,
        chunk: int,
    ) -> torch.Tensor:
        peak_BS = logits_BSV.amax(-1)
        if group.size() > 1:
            dist.all_reduce(peak_BS, op=dist.ReduceOp.MAX, group=group)
        total_BS = torch.empty_like(peak_BS)
        for part in _parts(logits_BSV, chunk):
            total_BS[part] = (logits_BSV[part] - peak_BS[part].unsqueeze(-1)).exp_().sum(-1)
        if group.size() > 1:
            dist.all_reduce(total_BS, group=group)
        normaliser_BS = peak_BS + total_BS.log_()
        local_BS = targets_BS - vocab_start
        mine_BS = (local_BS >= 0) & (local_BS < logits_BSV.size(-1))
        local_BS = local_BS.masked_fill(~mine_BS, 0)
        target_BS = logits_BSV.gather(-1, local_BS.unsqueeze(-1)).squeeze(-1) * mine_BS
        if group.size() > 1:
            dist.all_reduce(target_BS, group=group)
        ctx.save_for_backward(logits_BSV, normaliser_BS, local_BS, mine_BS)
        ctx.chunk = chunk
        return target_BS - normaliser_BS

    @staticmethod
    def backward(ctx: Any, grad_BS: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits_BSV, normaliser_BS, local_BS, mine_BS = ctx.saved_tensors
        grad_BSV = torch.empty_like(logits_BSV, memory_format=torch.contiguous_format)
        for part in _parts(logits_BSV, ctx.chunk):
            softmax = (logits_BSV[part] - normaliser_BS[part].unsqueeze(-1)).exp_()
            grad_BSV[part] = softmax.mul_(-grad_BS[part].unsqueeze(-1))
        grad_BSV.scatter_add_(-1, local_BS.unsqueeze(-1), (grad_BS * mine_BS).unsqueeze(-1))
        return grad_BSV, None, None, None, None


def _parts(logits_BSV: torch.Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Indices that cover all positions, at most `chunk` at a time, or one of each row."""
    rows, positions = logits_BSV.shape[:2]
    step = max(1, chunk // max(rows, 1))
    for start in range(0, positions, step):
        yield slice(None), slice(start, start + step)


def gather_vocab(logits_BSV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' slices concatenated, differentiable; every rank must compute the same from the
    result.
    """
    if group.size() == 1:
        return logits_BSV

    def gather(logits_BSV: torch.Tensor) -> torch.Tensor:
        ranks, width = group.size(), logits_BSV.size(-1)
        whole = logits_BSV.new_empty(*logits_BSV.shape[:-1], ranks * width)
        own_NV, whole_NRV = logits_BSV.reshape(-1, width), whole.view(-1, ranks, width)
        # Some positions at a time: little more is held than what is returned.
        step = max(1, _GATHERED // max(1, ranks * width))
        for start in range(0, own_NV.size(0), step):
            part_NV = own_NV[start : start + step].contiguous()
            part_RNV = part_NV.new_empty(ranks, *part_NV.shape)
            dist.all_gather_into_tensor(part_RNV.flatten(0, 1), part_NV, group=group)
            whole_NRV[start : start + step] = part_RNV.transpose(0, 1)
        return whole

    # Each rank holds the whole gradient of the same loss, so its own slice is enough.
    return exchange(logits_BSV, gather, lambda grad: take_part(grad, group, -1))
