"""The gated delta rule, in chunks and token by token.

Of every value head there is a state S `[K, V]`, and its token does

    S <- diag(exp(g)) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(K)

with q and k scaled to length 1. The logarithm g of the decay is one number, or one of each channel
of the key. With beta up to 2 instead of 1, the state's transitions can have negative eigenvalues.

In a chunk the corrections beta (v - S^T k) of all tokens solve one unit-triangular system. Sources:
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" and
"Gated Delta Networks: Improving Mamba2 with Delta Rule"; with decays per channel Kimi Team 2025,
"Kimi Linear: An Expressive, Efficient Attention Architecture".

Shapes: N tokens, Q sequences, C chunks of L places, H value heads, G key heads, K key and V value
channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_policy.recurrence import kernels
from megatron_policy.recurrence.chunks import Chunks, Slab, wide
from megatron_policy.recurrence.decay import Decay, share
from megatron_policy.recurrence.scan import Tensors, pass_on, scan

EPSILON = 1e-6
"""Added to the squared length of q and k, in transformers and in kernels."""
LEAST = 16
"""Places of the systems that are solved at once."""


def delta_rule(
    q_NGK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NHV: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    chunks: Chunks | kernels.Line,
    state_QHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[N, H, V]` in the dtype of values, and the state after each sequence, fp32.

    `g`, `[N, H]` or `[N, H, K]`, is the logarithm of the decay, never positive. As many value heads
    as `H / G` in a row share a key head. Without `state_QHKV` every sequence begins with zeros.
    A `Line` in place of chunks has kernels compute it.
    """
    if isinstance(chunks, kernels.Line):
        return kernels.delta_rule(q_NGK, k_NGK, v_NHV, g, beta_NH, chunks, state_QHKV)
    inputs = (q_NGK, k_NGK, v_NHV, g, beta_NH)
    shape_HKV = (v_NHV.size(1), k_NGK.size(-1), v_NHV.size(-1))
    return scan(_compute, chunks, inputs, (), shape_HKV, state_QHKV, v_NHV.dtype)


def delta_step(
    q_QGK: torch.Tensor,
    k_QGK: torch.Tensor,
    v_QHV: torch.Tensor,
    g: torch.Tensor,
    beta_QH: torch.Tensor,
    state_QHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` of one more token of each sequence, without chunks."""
    q_QHK, k_QHK = (share(x, v_QHV.size(1)) for x in _scale(q_QGK, k_QGK))
    decay = wide(g).exp()
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay[..., None, None]
    state_QHKV = state_QHKV * decay
    known_QHV = (state_QHKV * k_QHK.unsqueeze(-1)).sum(-2)
    new_QHV = wide(beta_QH).unsqueeze(-1) * (wide(v_QHV) - known_QHV)
    state_QHKV = state_QHKV + k_QHK.unsqueeze(-1) * new_QHV.unsqueeze(-2)
    return (state_QHKV * q_QHK.unsqueeze(-1)).sum(-2).to(v_QHV.dtype), state_QHKV


def _scale(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys as the recurrence takes them, `wide`."""
    return _unit(q) * q.size(-1) ** -0.5, _unit(k)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _compute(
    tokens: Tensors, shared: Tensors, state_QHKV: torch.Tensor, slab: Slab
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Core` of `scan`."""
    q_CGLK, k_CGLK, v_CHLV, g_CHL, beta_CHL = tokens
    q_CGLK, k_CGLK = _scale(q_CGLK, k_CGLK)
    q_CHLK, k_CHLK = (share(x, v_CHLV.size(1)) for x in (q_CGLK, k_CGLK))
    decay, beta_CHL1 = Decay.of(g_CHL), beta_CHL.unsqueeze(-1)
    within_CHLL = decay.products(q_CGLK, k_CGLK)
    system_CHLL = (beta_CHL1 * decay.products(k_CGLK, k_CGLK)).tril(-1)
    # What tokens write, had the state been zero, and what they read of it before they write.
    invert: Callable[..., torch.Tensor] = _Invert.apply
    inverse_CHLL = invert(system_CHLL)
    fresh_CHLV = inverse_CHLL @ (beta_CHL1 * v_CHLV)
    seen_CHLK = inverse_CHLL @ (beta_CHL1 * decay.reach * k_CHLK)
    query_CHLK, tail_CHKL = q_CHLK * decay.reach, (k_CHLK * decay.left).mT

    def step(
        state: torch.Tensor, fresh: torch.Tensor, seen: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor]:
        tail, whole = rest
        new = fresh - seen @ state
        return (state, new), whole * state + tail @ new

    parts = (fresh_CHLV, seen_CHLK, tail_CHKL, decay.whole)
    (first_CHKV, new_CHLV), state_QHKV = pass_on(slab, state_QHKV, parts, step)
    return query_CHLK @ first_CHKV + within_CHLL @ new_CHLV, state_QHKV


class _Invert(torch.autograd.Function):
    """The inverses of 1 + x, of which x is what is below the diagonal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        inverse = _invert(x)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        transposed: torch.Tensor = ctx.saved_tensors[0].mT
        return -(transposed @ grads[0] @ transposed).tril(-1)


def _invert(x: torch.Tensor) -> torch.Tensor:
    """By quarters down to a few places, which halve the number of places: matrix products take half
    the time of a triangular solve with as many columns as keys and values have.
    """
    places = x.size(-1)
    if places <= LEAST:
        one = torch.eye(places, dtype=x.dtype, device=x.device).expand_as(x)
        solved: torch.Tensor = torch.linalg.solve_triangular(
            x, one, upper=False, unitriangular=True
        )
        return solved
    early, late = slice(places // 2), slice(places // 2, None)
    first, last = _invert(torch.stack([x[..., early, early], x[..., late, late]]))
    inverse = torch.zeros_like(x)
    inverse[..., early, early], inverse[..., late, late] = first, last
    inverse[..., late, early] = -(last @ x[..., late, early] @ first)
    return inverse
