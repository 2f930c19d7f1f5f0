"""Runs a recurrence through the chunks of all sequences, forward and backward.

It is its own unit of recomputation: what it keeps for the backward pass are its inputs, as they
came, and the states between slabs of chunks. The backward pass goes through the slabs in reverse
order, computes each again and differentiates that. Intermediate results are those of one slab at
a time, in both passes.

Shapes: N tokens, Q sequences, C chunks of L places, H heads, K key and V value channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_policy.recurrence.chunks import Chunks, Slab, wide

Tensors = Sequence[torch.Tensor]
Core = Callable[[Tensors, Tensors, torch.Tensor, Slab], tuple[torch.Tensor, torch.Tensor]]
"""Outputs `[C, H, L, V]` of a slab and the last states `[., H, K, V]` of its sequences, from its
inputs `[C, H, L, ...]`, inputs that all tokens share, and its sequences' first states.
"""


def scan(
    core: Core,
    chunks: Chunks,
    tokens: Tensors,
    shared: Tensors,
    shape_HKV: tuple[int, int, int],
    state_QHKV: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[N, H, V]` in `dtype`, and the state after each sequence's last token, `wide`;
    differentiable in all tensors. `tokens` are inputs `[N, H, ...]`, each with a number of heads
    of its own. Sequences begin with `state_QHKV`, or with zeros; one without tokens keeps that.
    """
    assert all(x.size(0) == chunks.tokens for x in tokens), [x.shape for x in tokens]
    if state_QHKV is not None:
        assert state_QHKV.shape == (len(chunks.sequences), *shape_HKV), state_QHKV.shape
        state_QHKV = wide(state_QHKV)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Scan.apply
    # Where nothing is differentiated, no states are kept while it runs.
    run = _Run(core, chunks, len(tokens), shape_HKV, dtype, torch.is_grad_enabled())
    return apply(run, state_QHKV, *tokens, *shared)


def pass_on(
    slab: Slab,
    state_QHKV: torch.Tensor,
    parts: Tensors,
    step: Callable[..., tuple[Tensors, torch.Tensor]],
) -> tuple[Tensors, torch.Tensor]:
    """Call `step(states, *parts)` for the steps of a slab one after another, each with its chunks'
    share of `parts`. It returns what is wanted of its chunks, and the states after them. The result
    is the former of all chunks, and the last states of the slab's sequences.
    """
    wanted, ended = [], []
    # Not slices, each of which would have a gradient as large as all chunks together.
    for live, *own in zip(slab.live, *(part.split(slab.live) for part in parts), strict=True):
        if live < state_QHKV.size(0):
            state_QHKV, over = state_QHKV.tensor_split([live])
            ended.append(over)
        of_chunks, state_QHKV = step(state_QHKV, *own)
        wanted.append(of_chunks)
    joined = [torch.cat(of_steps) for of_steps in zip(*wanted, strict=True)]
    return joined, torch.cat([state_QHKV, *reversed(ended)])


@dataclass(frozen=True)
class _Run:
    """What is not a tensor; the first `count` inputs are the tokens'."""

    core: Core
    chunks: Chunks
    count: int
    shape_HKV: tuple[int, int, int]
    dtype: torch.dtype
    keeps: bool

    def zeros(self, sequences: int, like: torch.Tensor) -> torch.Tensor:
        """States of so many sequences."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(sequences, *self.shape_HKV, dtype=dtype)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _Run, state_QHKV: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks, tokens = run.chunks, inputs[: run.count]
        shared, (heads, _, width) = [wide(x) for x in inputs[run.count :]], run.shape_HKV
        if state_QHKV is None:
            running_QHKV = run.zeros(len(chunks.sequences), tokens[0])
        else:
            running_QHKV = state_QHKV.clone()
        out_NHV = tokens[0].new_empty(chunks.tokens + 1, heads, width, dtype=run.dtype)
        kept = []
        for slab in chunks.slabs:
            where = chunks.order_Q[slab.sequences]
            first_QHKV = running_QHKV[where]
            if run.keeps and not slab.begins:
                kept.append(first_QHKV)
            taken = [chunks.take(x, slab) for x in tokens]
            out_CHLV, running_QHKV[where] = run.core(taken, shared, first_QHKV, slab)
            chunks.put(out_CHLV, slab, out_NHV)
        ctx.run = run
        ctx.save_for_backward(state_QHKV, *inputs, *kept)
        ctx.set_materialize_grads(False)
        return out_NHV[:-1], running_QHKV

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_NHV: torch.Tensor | None, grad_last_QHKV: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        run: _Run = ctx.run
        chunks, (state_QHKV, *saved) = run.chunks, ctx.saved_tensors
        given = len(ctx.needs_input_grad) - 2
        tokens, shared, kept = saved[: run.count], saved[run.count : given], saved[given:]
        if grad_NHV is None:
            heads, _, width = run.shape_HKV
            grad_NHV = tokens[0].new_zeros(chunks.tokens, heads, width)
        if grad_last_QHKV is None:
            grad_QHKV = run.zeros(len(chunks.sequences), tokens[0])
        else:
            grad_QHKV = grad_last_QHKV.clone()
        grad_tokens = [x.new_empty(x.size(0) + 1, *x.shape[1:]) for x in tokens]
        grad_shared = [torch.zeros_like(wide(x)) for x in shared]
        for slab in reversed(chunks.slabs):
            where = chunks.order_Q[slab.sequences]
            if not slab.begins:
                first_QHKV = kept.pop()
            elif state_QHKV is None:
                first_QHKV = run.zeros(slab.live[0], tokens[0])
            else:
                first_QHKV = state_QHKV[where]
            leaves = [first_QHKV, *(chunks.take(x, slab) for x in tokens), *map(wide, shared)]
            grads = (chunks.take(grad_NHV, slab), grad_QHKV[where])
            grad_QHKV[where], *found = _differentiate(run, slab, leaves, grads)
            for grad_N, grad_CHL in zip(grad_tokens, found[: run.count], strict=True):
                chunks.put(grad_CHL, slab, grad_N)
            for total, grad in zip(grad_shared, found[run.count :], strict=True):
                total.add_(grad)
        of_tokens = [grad_N[:-1] for grad_N in grad_tokens]
        of_shared = [grad.to(x.dtype) for grad, x in zip(grad_shared, shared, strict=True)]
        return None, None if state_QHKV is None else grad_QHKV, *of_tokens, *of_shared


def _differentiate(
    run: _Run, slab: Slab, inputs: list[torch.Tensor], grads: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of a slab's first states, its tokens' inputs and the shared ones, from those of its
    outputs and last states.
    """
    with torch.enable_grad():
        first_QHKV, *others = leaves = [x.detach().requires_grad_() for x in inputs]
        computed = run.core(others[: run.count], others[run.count :], first_QHKV, slab)
        return torch.autograd.grad(computed, leaves, grads)
