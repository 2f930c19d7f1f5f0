"""What torch's kernel for sequences of different lengths computes, with all scores explicit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megatron_policy.attention import varlen_attention


class VarlenOracle:
    """Takes the arguments of `varlen_attn` that `device.varlen_kernel` leaves open, holds them to
    the kernel's rules, and materialises all scores; `calls` counts.

    Shapes: T queries and U keys of all sequences, N query heads, G key-value groups, H head dim.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query_TNH: torch.Tensor,
        key_UGH: torch.Tensor,
        value_UGH: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        most_queries: int,
        most_keys: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        self.calls += 1
        states = (query_TNH, key_UGH, value_UGH)
        head = query_TNH.size(-1)
        assert head % 8 == 0 and head <= 256
        assert all(x.dim() == 3 and x.size(-1) == head and x.stride(-1) == 1 for x in states)
        assert query_TNH.size(1) % key_UGH.size(1) == 0
        lengths = []
        for ends, x, most in (
            (query_ends, query_TNH, most_queries),
            (key_ends, key_UGH, most_keys),
        ):
            assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == x.size(0)
            assert most == ends.diff().max()
            lengths.append(ends.diff().tolist())
        queries, keys, values = (
            x.split(of) for x, of in zip(states, (lengths[0], lengths[1], lengths[1]), strict=True)
        )
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([_alone(*part, scale, window_size) for part in parts])


def _alone(
    query_SNH: torch.Tensor,
    key_KGH: torch.Tensor,
    value_KGH: torch.Tensor,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    shared = query_SNH.size(1) // key_KGH.size(1)
    key_NKH, value_NKH = (
        x.repeat_interleave(shared, 1).transpose(0, 1) for x in (key_KGH, value_KGH)
    )
    queries, keys = query_SNH.size(0), key_KGH.size(0)
    own = torch.arange(keys - queries, keys, device=query_SNH.device).unsqueeze(1)
    back = own - torch.arange(keys, device=query_SNH.device)
    left, right = window_size
    hidden = back < -right
    if left >= 0:
        hidden |= back > left
    scores = (query_SNH.transpose(0, 1) @ key_NKH.mT * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ value_NKH).transpose(0, 1)


@contextmanager
def varlen_oracle() -> Iterator[VarlenOracle]:
    """Within this context there seems to be such a kernel, for fp32 too."""
    oracle = VarlenOracle()
    with mock.patch.multiple(
        varlen_attention, varlen_kernel=lambda: oracle, _DTYPES=(torch.float32,)
    ):
        yield oracle
