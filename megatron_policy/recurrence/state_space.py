"""Mamba2's state-space recurrence, in chunks and token by token.

Of every head there is a state S `[K, V]`, and its token does

    S <- exp(a dt) S + b (dt x)^T;   y = S^T c + d x

with a < 0 and d of the head, dt > 0 of the token and head, b and c of the token and a group of
heads. Source: Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms
Through Structured State Space Duality".

Shapes: N tokens, Q sequences, C chunks of L places, H heads, G groups of heads, K channels of the
state (its "size"), V channels of a head.
"""

from __future__ import annotations

import torch

from megatron_policy.recurrence import kernels
from megatron_policy.recurrence.chunks import Chunks, Slab, wide
from megatron_policy.recurrence.decay import Decay, share
from megatron_policy.recurrence.scan import Tensors, pass_on, scan


def state_space(
    x_NHV: torch.Tensor,
    dt_NH: torch.Tensor,
    A_log_H: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    d_H: torch.Tensor,
    chunks: Chunks | kernels.Line,
    state_QHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[N, H, V]` in the dtype of `x_NHV`, and the state after each sequence, fp32.

    `dt_NH` are `time_steps` of `gates.py`, and a is `-exp(A_log)`. As many heads as `H / G` in a
    row share a group. Without `state_QHKV` every sequence begins with zeros. A `Line` in
    place of chunks has kernels compute it.
    """
    if isinstance(chunks, kernels.Line):
        tokens = (x_NHV, dt_NH, A_log_H, b_NGK, c_NGK, d_H)
        return kernels.state_space(*tokens, chunks, state_QHKV)
    inputs, shared = (x_NHV, dt_NH, b_NGK, c_NGK), (A_log_H, d_H)
    shape_HKV = (x_NHV.size(1), b_NGK.size(-1), x_NHV.size(-1))
    return scan(_compute, chunks, inputs, shared, shape_HKV, state_QHKV, x_NHV.dtype)


def state_space_step(
    x_QHV: torch.Tensor,
    dt_QH: torch.Tensor,
    A_log_H: torch.Tensor,
    b_QGK: torch.Tensor,
    c_QGK: torch.Tensor,
    d_H: torch.Tensor,
    state_QHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`state_space` of one more token of each sequence, without chunks."""
    x_wide, heads = wide(x_QHV), x_QHV.size(1)
    b_QHK, c_QHK = (share(wide(y), heads) for y in (b_QGK, c_QGK))
    state_QHKV = state_QHKV * (_rates(A_log_H) * dt_QH).exp()[..., None, None]
    state_QHKV = state_QHKV + b_QHK.unsqueeze(-1) * (x_wide * dt_QH.unsqueeze(-1)).unsqueeze(-2)
    read_QHV = (state_QHKV * c_QHK.unsqueeze(-1)).sum(-2)
    return (read_QHV + wide(d_H).unsqueeze(-1) * x_wide).to(x_QHV.dtype), state_QHKV


def _rates(A_log_H: torch.Tensor) -> torch.Tensor:
    return -wide(A_log_H).exp()


def _compute(
    tokens: Tensors, shared: Tensors, state_QHKV: torch.Tensor, slab: Slab
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Core` of `scan`."""
    (x_CHLV, dt_CHL, b_CGLK, c_CGLK), (A_log_H, d_H) = tokens, shared
    decay = Decay.of(dt_CHL * _rates(A_log_H).unsqueeze(-1))
    scaled_CHLV = x_CHLV * dt_CHL.unsqueeze(-1)
    b_CHLK, c_CHLK = (share(y, x_CHLV.size(1)) for y in (b_CGLK, c_CGLK))
    within_CHLV = decay.products(c_CGLK, b_CGLK) @ scaled_CHLV + d_H[:, None, None] * x_CHLV
    added_CHKV = b_CHLK.mT @ (scaled_CHLV * decay.left)

    def step(
        state: torch.Tensor, whole: torch.Tensor, added: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor]:
        return (state,), whole * state + added

    (first_CHKV,), state_QHKV = pass_on(slab, state_QHKV, (decay.whole, added_CHKV), step)
    return within_CHLV + decay.reach * (c_CHLK @ first_CHKV), state_QHKV
