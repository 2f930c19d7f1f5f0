"""The filters of sampling: which entries of the vocabulary a token is drawn from, by min-p, top-k
and top-p of logits that are split between ranks.

Each token has one bound, found by bisection: ranks exchange a number per token and step, never
logits. All sums of probabilities are in fp64.

Shapes: N tokens, R some of them, V the whole vocabulary, W entries of this rank's slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_policy.config import GenerationConfig


@dataclass(frozen=True)
class Filters:
    """What is kept of a distribution, in vLLM's order, which NeMo RL follows; then probabilities
    are divided by their sum.

    `min_p`: entries of at least this share of the largest probability. `top_k`: the k most likely,
    with all that are as likely as the k-th. `top_p`: of what is left the smallest set of most
    likely entries whose share reaches p, and among equals those with higher numbers.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, settings: GenerationConfig) -> Filters | None:
        """Those that tokens are drawn by; None if they keep everything."""
        found = cls(settings.top_k, settings.top_p, settings.min_p)
        return None if found == cls() else found

    @classmethod
    def of_logprobs(cls, settings: GenerationConfig | None) -> Filters | None:
        """Those of log-probabilities: the same, or none."""
        return cls.of(settings) if settings is not None and settings.filter_logprobs else None


@dataclass(frozen=True)
class Bounds:
    """The lowest kept logit of each token, and the lowest kept entry among those of this logit."""

    logit_N: torch.Tensor
    entry_N: torch.Tensor

    @classmethod
    def of_nothing(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> Bounds:
        """Bounds that keep everything, to be filled."""
        logit_N = torch.full((tokens,), -math.inf, dtype=dtype, device=device)
        return cls(logit_N, torch.zeros(tokens, dtype=torch.int64, device=device))

    def of(self, rows: slice) -> Bounds:
        return Bounds(self.logit_N[rows], self.entry_N[rows])

    def fill(self, rows: slice, found: Bounds) -> None:
        self.logit_N[rows], self.entry_N[rows] = found.logit_N, found.entry_N

    def mask_dropped(self, logits_RW: torch.Tensor, first: int) -> torch.Tensor:
        """Mask of filtered logits, of entries from `first` on; NaN stays visible."""
        logit_R1, entry_R1 = self.logit_N.unsqueeze(1), self.entry_N.unsqueeze(1)
        entries_W = torch.arange(first, first + logits_RW.size(1), device=logits_RW.device)
        tied_RW = (logits_RW == logit_R1) & (entries_W < entry_R1)
        return tied_RW.logical_or_(logits_RW < logit_R1)


def find_bounds(
    logits_RW: torch.Tensor,
    first: int,
    vocab: int,
    filters: Filters,
    group: dist.ProcessGroup | None = None,
) -> Bounds:
    """The bounds of tokens with these logits, fp32 or fp64, of this rank's entries from `first` on;
    without a `group` they are the whole vocabulary. W can be 0. `vocab` is at least V.

    The same on every rank of the group, which calls it together.
    """
    if logits_RW.size(1):
        peak_R = logits_RW.amax(-1)
    else:
        peak_R = logits_RW.new_full((len(logits_RW),), torch.finfo(logits_RW.dtype).min)
    if group is not None and group.size() > 1:
        dist.all_reduce(peak_R, op=dist.ReduceOp.MAX, group=group)
    found = Bounds.of_nothing(len(peak_R), peak_R.dtype, peak_R.device)
    logit_R, low_R, high_R = found.logit_N, _to_key(found.logit_N), _to_key(peak_R)
    steps = 8 * peak_R.element_size()
    if filters.min_p > 0:
        logit_R = peak_R + math.log(filters.min_p)
    if filters.top_k is not None:

        def count(key_R: torch.Tensor) -> torch.Tensor:
            reached_RW = logits_RW >= _from_key(key_R, peak_R.dtype).unsqueeze(1)
            return _sum_over_vocab(reached_RW, group)

        need_R = torch.full_like(peak_R, filters.top_k, dtype=torch.float64)
        kth_R = _find_largest(count, need_R, low_R, high_R, steps)
        logit_R = torch.maximum(logit_R, _from_key(kth_R, peak_R.dtype))
    if filters.top_p == 1:
        return Bounds(logit_R, found.entry_N)
    powers_RW = (logits_RW - peak_R.unsqueeze(1)).exp_()
    powers_RW.masked_fill_(logits_RW < logit_R.unsqueeze(1), 0.0)
    need_R = _sum_over_vocab(powers_RW, group) * filters.top_p

    def share(key_R: torch.Tensor) -> torch.Tensor:
        reached_RW = logits_RW >= _from_key(key_R, peak_R.dtype).unsqueeze(1)
        return _sum_over_vocab(torch.where(reached_RW, powers_RW, 0.0), group)

    logit_R = _from_key(_find_largest(share, need_R, low_R, high_R, steps), peak_R.dtype)

    def share_from(entry_R: torch.Tensor) -> torch.Tensor:
        dropped_RW = Bounds(logit_R, entry_R).mask_dropped(logits_RW, first)
        return _sum_over_vocab(powers_RW.masked_fill(dropped_RW, 0.0), group)

    last_R = torch.full_like(found.entry_N, vocab - 1)
    entry_R = _find_largest(share_from, need_R, found.entry_N, last_R, vocab.bit_length())
    return Bounds(logit_R, entry_R)


def _find_largest(
    weight: Callable[[torch.Tensor], torch.Tensor],
    need_R: torch.Tensor,
    low_R: torch.Tensor,
    high_R: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """The largest integer from `low_R` to `high_R` at which a falling weight is still `need_R`; the
    lowest if none is. The range has fewer than `2**steps` integers.
    """
    for _ in range(steps):
        middle_R = (low_R | high_R) - ((low_R ^ high_R) >> 1)  # rounded up, without overflow
        enough_R = weight(middle_R) >= need_R
        low_R = torch.where(enough_R, middle_R, low_R)
        high_R = torch.where(enough_R, high_R, middle_R - 1)
    return low_R


def _sum_over_vocab(values_RW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over the whole vocabulary, fp64."""
    total_R = values_RW.sum(-1, dtype=torch.float64)
    if group is not None and group.size() > 1:
        dist.all_reduce(total_R, group=group)
    return total_R


def _to_key(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of these floats; for 0 and -0 the same."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    return order_bits((values + 0.0).view(integer))


def _from_key(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return order_bits(keys).view(dtype)


def order_bits(bits: torch.Tensor) -> torch.Tensor:
    """Maps bits of floats to integers of the same order, and back: negative floats are stored as
    sign and magnitude, integers in two's complement.
    """
    top = 8 * bits.element_size() - 1
    below_sign: torch.Tensor = (bits >> top) & (2**top - 1)
    return bits ^ below_sign
