"""How far a policy's log-probabilities of sampled tokens are from those of the engine that sampled
them.

Shapes: B rows, S positions. A part is a tensor of `_SIZES` numbers and two for each range of
positions, fp64: they add up over microbatches and ranks, but for the first, the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from megatron_policy.config.numbers import MISMATCH_BOUND
from megatron_policy.errors import BatchError

ROLLOUT_KEYS = ("generation_logprobs", "rollout_log_probs")
"""The keys under which batches have the engine's log-probabilities `[B, S]`, as NeMo RL and as verl
name them; of both the first counts.
"""
_RATIO = 20.0
"""Logarithms of ratios are cut to this in the divergence, as the hosts cut them."""
_SIZES, _RANGES = 6, 24
"""The numbers of a part before those of positions, and how many ranges of positions there are."""


@dataclass(frozen=True)
class RolloutMismatch:
    """Training's log-probabilities of sampled tokens against the engine's. A token of which one of
    the two is not finite has no distance: it is in `not_finite` and beyond the bound, and in no
    other number. None is a mean, or the largest, of no tokens.
    """

    bound: float
    tokens: int
    """How many tokens are compared: those that count and are finite on both sides."""
    not_finite: int
    """How many tokens count and cannot be compared."""
    abs_diff: float | None
    """The mean of the distances, in nats."""
    abs_diff_max: float | None
    kl: float | None
    """The divergence of training's distribution from the engine's, KL(rollout || train), by the
    estimator k3: the mean of `r - 1 - log r` with the ratio r of training's probability to the
    engine's.
    """
    share_beyond: float | None
    """The share of tokens whose distance exceeds `bound`."""
    by_position: Mapping[int, float] = field(default_factory=dict)
    """On request: the mean distance of tokens at positions from each key to before its double."""

    @classmethod
    def joined(cls, parts: Sequence[Sequence[float]], bound: float) -> RolloutMismatch:
        """That of all `parts` together; there is at least one."""
        largest, tokens, not_finite, beyond, distance, divergence, *places = join_parts(parts)
        counted = tokens + not_finite
        ranges = zip(places[::2], places[1::2], strict=True)
        return cls(
            bound,
            int(tokens),
            int(not_finite),
            abs_diff=distance / tokens if tokens else None,
            abs_diff_max=largest if tokens else None,
            kl=divergence / tokens if tokens else None,
            share_beyond=beyond / counted if counted else None,
            by_position={_first(k): own / n for k, (n, own) in enumerate(ranges) if n},
        )

    def metrics(self) -> dict[str, float]:
        """The numbers that there are, by the names under which dashboards have them."""
        found = {
            "logprob_abs_diff": self.abs_diff,
            "logprob_abs_diff_max": self.abs_diff_max,
            "kl": self.kl,
            "share_beyond": self.share_beyond,
            "tokens": self.tokens,
            "not_finite": self.not_finite,
        }
        found |= {f"logprob_abs_diff_from_{first}": n for first, n in self.by_position.items()}
        return {f"train_rollout_{name}": n for name, n in found.items() if n is not None}


def compare_rollouts(
    train_BS: torch.Tensor,
    rollout_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    *,
    bound: float = MISMATCH_BOUND,
    by_position: bool = False,
) -> RolloutMismatch:
    """Compare log-probabilities as `policy.logprobs` returns them with those of the engine that
    sampled the tokens, where the mask is not 0; the three agree in their positions. `by_position`
    adds the mean distance in ranges of positions 0 and 1, 2 and 3, 4 to 7, 8 to 15 and so on.
    BatchError for other shapes.
    """
    shapes = [tuple(each.shape) for each in (train_BS, rollout_BS, mask_BS)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise BatchError(
            f"log-probabilities of training, those of rollouts and the mask have shapes {shapes}: "
            "pass three tensors of one shape [B, S]"
        )
    rollout_BS, mask_BS = rollout_BS.to(train_BS.device), mask_BS.to(train_BS.device)
    part = measure_part(train_BS, rollout_BS, mask_BS != 0, bound, by_position=by_position)
    return RolloutMismatch.joined([part.tolist()], bound)


@torch.no_grad()
def measure_part(
    train_BS: torch.Tensor,
    rollout_BS: torch.Tensor,
    counted_BS: torch.Tensor,
    bound: float,
    *,
    by_position: bool,
) -> torch.Tensor:
    """The numbers of these rows that parts add up, on their device."""
    difference_BS = train_BS.float() - rollout_BS.float()
    finite_BS = counted_BS & difference_BS.isfinite()
    difference_BS = difference_BS.where(finite_BS, 0.0)
    distance_BS, ratio_BS = difference_BS.abs(), difference_BS.clamp(-_RATIO, _RATIO)
    lost_BS = counted_BS & ~finite_BS
    numbers = [
        F.pad(distance_BS.flatten(), (0, 1)).amax(),  # also of no rows
        finite_BS.sum(),
        lost_BS.sum(),
        ((distance_BS > bound) | lost_BS).sum(),
        distance_BS.sum(dtype=torch.float64),
        # Not exp(r) - 1 - r: of small r nothing but rounding would be left.
        (ratio_BS.expm1() - ratio_BS).clamp(min=0).sum(dtype=torch.float64),
    ]
    part = torch.stack([each.double() for each in numbers])
    if not by_position:
        return part
    columns_S2 = torch.stack([finite_BS.sum(0), distance_BS.sum(0, dtype=torch.float64)], 1)
    ranges = [columns_S2[_first(k) : 2 << k].sum(0) for k in range(_RANGES)]
    return torch.cat([part, *ranges])


def join_parts(parts: Sequence[Sequence[float]]) -> list[float]:
    """All parts as one; there is at least one."""
    largest, *sums = zip(*parts, strict=True)
    return [max(largest), *map(sum, sums)]


def make_empty_part(*, by_position: bool) -> list[float]:
    """The part of no tokens."""
    return [0.0] * (_SIZES + 2 * _RANGES * by_position)


def _first(number: int) -> int:
    """The first position of a range, by the range's number."""
    return 1 << number if number else 0
