"""What stands between a recurrence and its layer's projections: gates before it, and norms with a
gate after it. All are computed in fp32, rounded once, and again computed in the backward pass.

Shapes: N tokens, H heads, K key channels, G groups of channels that are normalised together, V
channels of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_policy.recurrence.chunks import wide
from megatron_policy.recurrence.recomputed import recomputed

Activation = Callable[[torch.Tensor], torch.Tensor]


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Logarithms of a delta rule's decays, `wide`: of `a_NH` with parameters `[H]`, or of `a_NHK`
    with `A_log` `[H, 1]` and `dt_bias` `[H, K]`.
    """

    def compute(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
        return -wide(A_log).exp() * F.softplus(wide(a) + wide(dt_bias))

    return recomputed(compute, a, A_log, dt_bias)


def write_strength(b_NH: torch.Tensor, doubled: bool = False) -> torch.Tensor:
    """A delta rule's beta, `wide`: between 0 and 1, or 2 if `doubled`."""
    beta_NH = wide(b_NH).sigmoid()
    return 2 * beta_NH if doubled else beta_NH


def time_steps(
    dt_NH: torch.Tensor, dt_bias_H: torch.Tensor, limit: tuple[float, float] = (0.0, math.inf)
) -> torch.Tensor:
    """The length of each token's step in Mamba2, `wide`, within `limit`."""

    def compute(dt: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
        return F.softplus(wide(dt) + wide(dt_bias)).clamp(*limit)

    return recomputed(compute, dt_NH, dt_bias_H)


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

    def compute(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (_normalise(epsilon, y, weight) * activation(wide(gate))).to(y.dtype)

    return recomputed(compute, y_NGV, gate_NGV, weight)


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

    def compute(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        gated = wide(y) * activation(wide(gate))
        return (gated if weight is None else _normalise(epsilon, gated, weight)).to(y.dtype)

    return recomputed(compute, y_NGV, gate_NGV, weight)


def normalise(
    y: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    mean_square: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(y) * weight` over the last dimension, whose `mean_square` can be given: that of
    channels of which `y` has some.
    """

    def compute(
        y: torch.Tensor, weight: torch.Tensor, mean_square: torch.Tensor | None
    ) -> torch.Tensor:
        return _normalise(epsilon, y, weight, mean_square).to(y.dtype)

    return recomputed(compute, y, weight, mean_square)


def sum_squares(y: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, which is kept; `wide`."""

    def compute(y: torch.Tensor) -> torch.Tensor:
        return wide(y).square().sum(-1, keepdim=True)

    return recomputed(compute, y)


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
