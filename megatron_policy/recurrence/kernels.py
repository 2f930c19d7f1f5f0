"""The recurrences by the Triton kernels of flash-linear-attention, an optional package.

It needs nothing that is compiled beforehand, and has a kernel for each: Mamba2's scan is its
"simple gated linear attention", with b as keys and c as queries. Kernels multiply in the dtype of
their inputs and add up in fp32. They add in no fixed order, so that results vary in their last bits
from run to run.

Shapes: N tokens, Q sequences, H heads, G key heads or groups, K key channels or state, V value
channels, D channels and W taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from megatron_policy.recurrence.chunks import wide
from megatron_policy.recurrence.decay import share
from megatron_policy.recurrence.recomputed import recomputed

PACKAGE = "fla"
LARGEST_KEY = 256
"""Channels of a key head, which a kernel holds at once."""


@dataclass(frozen=True)
class Line:
    """Sequences one after another, as kernels take them."""

    order_N: torch.Tensor | None
    """The token at each place; None: the tokens are in order."""
    ends_Q: torch.Tensor
    """0, and where each sequence ends, `[Q + 1]`."""
    host_ends_Q: torch.Tensor
    """The same in host memory, so that nobody waits for the device."""

    @classmethod
    def of(cls, sequences: Sequence[range]) -> Line:
        """Made on the CPU."""
        ends_Q = torch.tensor([0, *accumulate(map(len, sequences))])
        order = [token for one in sequences for token in one]
        in_order = order == list(range(len(order)))
        return cls(None if in_order else torch.tensor(order), ends_Q, ends_Q)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Line:
        """The same with its indices where `move` puts them."""
        order_N = None if self.order_N is None else move(self.order_N)
        return replace(self, order_N=order_N, ends_Q=move(self.ends_Q))

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What every kernel is told of the sequences."""
        return {"cu_seqlens": self.ends_Q, "cu_seqlens_cpu": self.host_ends_Q}

    def take(self, x_N: torch.Tensor) -> torch.Tensor:
        """`[N, ...]` as a row of sequences, `[1, N, ...]`."""
        return (x_N if self.order_N is None else x_N[self.order_N]).unsqueeze(0)

    def put(self, y_1N: torch.Tensor) -> torch.Tensor:
        """The inverse of `take`."""
        y_N = y_1N.squeeze(0)
        return (
            y_N if self.order_N is None else torch.empty_like(y_N).index_copy(0, self.order_N, y_N)
        )


def delta_rule(
    q_NGK: torch.Tensor,
    k_NGK: torch.Tensor,
    v_NHV: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
    line: Line,
    state_QHKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrence.delta_rule.delta_rule`."""
    by_channel = g.ndim == 3
    kernel = (
        _find("ops.kda", "chunk_kda")
        if by_channel
        else _find("ops.gated_delta_rule", "chunk_gated_delta_rule")
    )
    out, last_QHKV = kernel(
        *map(line.take, (q_NGK, k_NGK, v_NHV, g, beta_NH)),
        initial_state=state_QHKV,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **line.given,
    )
    return line.put(out), last_QHKV


def state_space(
    x_NHV: torch.Tensor,
    dt_NH: torch.Tensor,
    A_log_H: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    d_H: torch.Tensor,
    line: Line,
    state_QHKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrence.state_space.state_space`. The kernel wants b and c of every head, which are
    made again in the backward pass.
    """
    kernel = _find("ops.simple_gla", "chunk_simple_gla")

    def compute(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, A_log, b, c, d, state = inputs
        scaled = (wide(x) * dt.unsqueeze(-1)).to(x.dtype)
        keys = (share(c, x.size(1)), share(b, x.size(1)))
        out, last = kernel(
            *map(line.take, (*keys, scaled, -wide(A_log).exp() * dt)),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
            **line.given,
        )
        return (wide(line.put(out)) + wide(d).unsqueeze(-1) * wide(x)).to(x.dtype), last

    return recomputed(compute, x_NHV, dt_NH, A_log_H, b_NGK, c_NGK, d_H, state_QHKV)


def convolve(
    x_ND: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    line: Line,
    past_QWD: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrence.convolution.convolve`."""
    kernel = _find("modules.causal_conv1d", "causal_conv1d")
    # The kernel's states have a place for the token itself besides those of the W - 1 before it.
    state_QDW = None if past_QWD is None else F.pad(past_QWD.to(x_ND.dtype).mT, (1, 0))
    out, last_QDW = kernel(
        line.take(x_ND),
        weight_DW,
        bias_D,
        initial_state=state_QDW,
        output_final_state=True,
        activation="silu" if silu else None,
        **line.given,
    )
    return line.put(out), last_QDW[..., 1:].mT


def _find(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = vars(import_module(f"{PACKAGE}.{module}"))[name]
    return function
