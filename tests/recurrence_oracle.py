"""Recurrent layers' mathematics token by token, as their definitions have it: the truth in fp64.

Shapes: N tokens, Q sequences, H heads, G key heads or groups, K key and V value channels,
D channels of a convolution, W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Result = tuple[torch.Tensor, torch.Tensor]


def delta_rule(
    q_NGK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NHV: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    state_QHKV: torch.Tensor,
    sequences: Sequence[range],
) -> Result:
    heads = v_NHV.size(1)
    q, k = (x.repeat_interleave(heads // x.size(1), 1) for x in (q_NGK, k_NGK))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / q.size(-1) ** 0.5
    decay = g.exp().unsqueeze(-1) if g.ndim == 3 else g.exp()[..., None, None]

    def step(n: int, state: torch.Tensor) -> Result:
        state = decay[n] * state
        known = torch.einsum("hkv,hk->hv", state, k[n])
        written = beta_NH[n].unsqueeze(-1) * (v_NHV[n] - known)
        state = state + torch.einsum("hk,hv->hkv", k[n], written)
        return torch.einsum("hkv,hk->hv", state, q[n]), state

    return _run(step, v_NHV, state_QHKV, sequences)


def state_space(
    x_NHV: torch.Tensor,
    dt_NH: torch.Tensor,
    A_log_H: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    d_H: torch.Tensor,
    state_QHKV: torch.Tensor,
    sequences: Sequence[range],
) -> Result:
    heads = x_NHV.size(1)
    b, c = (y.repeat_interleave(heads // y.size(1), 1) for y in (b_NGK, c_NGK))
    a = -A_log_H.exp()

    def step(n: int, state: torch.Tensor) -> Result:
        scaled = dt_NH[n].unsqueeze(-1) * x_NHV[n]
        state = (a * dt_NH[n]).exp()[:, None, None] * state
        state = state + torch.einsum("hk,hv->hkv", b[n], scaled)
        read = torch.einsum("hkv,hk->hv", state, c[n])
        return read + d_H.unsqueeze(-1) * x_NHV[n], state

    return _run(step, x_NHV, state_QHKV, sequences)


def convolve(
    x_ND: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    past_QWD: torch.Tensor,
    sequences: Sequence[range],
    silu: bool = True,
) -> Result:
    """With SiLU, and the last W - 1 inputs of each sequence."""

    def step(n: int, seen: torch.Tensor) -> Result:
        window = torch.cat([seen, x_ND[n].unsqueeze(0)])
        out = (window * weight_DW.T).sum(0)
        out = out if bias_D is None else out + bias_D
        return F.silu(out) if silu else out, window[1:]

    return _run(step, x_ND, past_QWD, sequences)


def _run(
    step: Callable[[int, torch.Tensor], Result],
    like_N: torch.Tensor,
    states_Q: torch.Tensor,
    sequences: Sequence[range],
) -> Result:
    outputs = list(torch.zeros_like(like_N))
    last = []
    for state, sequence in zip(states_Q, sequences, strict=True):
        for n in sequence:
            outputs[n], state = step(n, state)
        last.append(state)
    return torch.stack(outputs), torch.stack(last)
