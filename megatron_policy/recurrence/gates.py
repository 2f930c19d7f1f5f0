"""What stands between a recurrence and its layer's projections: gates before it, and norms with a
gate after it. All are computed in fp32, rounded once, and again computed in the backward pass.

Shapes: N tokens, H heads, K key channels, G groups of channels that are normalised together, V
channels of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron_policy.recurrence.chunks import wide
from megatron_policy.recurrence.recomputed import recomputed

Activation = Callable[[torch.Tensor], torch.Tensor]


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Logarithms of a delta rule's decays, `wide`: of `a_NH` with parameters `[H]`, or of `a_NHK`
    with `A_log` `[H, 1]` and `dt_bias` `[H, K]`.
    """
    return recomputed(_log_decay, a, A_log, dt_bias)


def write_strength(b_NH: torch.Tensor, doubled: bool = False) -> torch.Tensor:
    """A delta rule's beta, `wide`: between 0 and 1, or 2 if `doubled`."""
    beta_NH = wide(b_NH).sigmoid()
    return 2 * beta_NH if doubled else beta_NH


def time_steps(
    dt_NH: torch.Tensor, dt_bias_H: torch.Tensor, limit: tuple[float, float] = (0.0, math.inf)
) -> torch.Tensor:
    """The length of each token's step in Mamba2, `wide`, within `limit`."""
    return recomputed(partial(_time_steps, limit), dt_NH, dt_bias_H)


def normalise_then_gate(
    y_NGV: torch.Tensor,
    gate_NGV: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    activation: Activation = F.silu,
) -> torch.Tensor:
    """`norm(y) * weight * activation(gate)`: the gated delta net's, whose groups are heads with one
    weight `[V]` for all of them. Weights can be `[G, V]` too.
    """
    return recomputed(partial(_after, epsilon, activation), y_NGV, gate_NGV, weight)


def gate_then_normalise(
    y_NGV: torch.Tensor,
    gate_NGV: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    activation: Activation = F.silu,
) -> torch.Tensor:
    """`norm(y * activation(gate)) * weight`: Mamba2's, whose weights are `[G, V]`. Without a weight
    there is no norm.
    """
    return recomputed(partial(_before, epsilon, activation), y_NGV, gate_NGV, weight)


def normalise(
    y: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    mean_square: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(y) * weight` over the last dimension, whose `mean_square` can be given: that of
    channels of which `y` has some.
    """
    return recomputed(partial(_round_normalised, epsilon), y, weight, mean_square)


def sum_squares(y: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, which is kept; `wide`."""
    return recomputed(_sum_squares, y)


def _log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    return -wide(A_log).exp() * F.softplus(wide(a) + wide(dt_bias))


def _time_steps(
    limit: tuple[float, float], dt_NH: torch.Tensor, dt_bias_H: torch.Tensor
) -> torch.Tensor:
    return F.softplus(wide(dt_NH) + wide(dt_bias_H)).clamp(*limit)


def _after(
    epsilon: float, activation: Activation, y: torch.Tensor, gate: torch.Tensor, weight: Any
) -> torch.Tensor:
    return (_normalise(epsilon, y, weight) * activation(wide(gate))).to(y.dtype)


def _before(
    epsilon: float, activation: Activation, y: torch.Tensor, gate: torch.Tensor, weight: Any
) -> torch.Tensor:
    gated = wide(y) * activation(wide(gate))
    return (gated if weight is None else _normalise(epsilon, gated, weight)).to(y.dtype)


def _sum_squares(y: torch.Tensor) -> torch.Tensor:
    return wide(y).square().sum(-1, keepdim=True)


def _round_normalised(
    epsilon: float, y: torch.Tensor, weight: torch.Tensor, mean_square: torch.Tensor | None
) -> torch.Tensor:
    return _normalise(epsilon, y, weight, mean_square).to(y.dtype)


def _normalise(
    epsilon: float,
    y: torch.Tensor,
    weight: torch.Tensor,
    mean_square: torch.Tensor | None = None,
) -> torch.Tensor:
    y = wide(y)
    if mean_square is None:
        mean_square = y.square().mean(-1, keepdim=True)
    return wide(weight) * (y * torch.rsqrt(mean_square + epsilon))
