"""Depthwise causal convolutions over sequences, and what later tokens need of the past.

As in `scan.py`, the backward pass computes again what it needs of the input, which alone is kept.
Channels are independent of each other and computed some at a time.

Shapes: N tokens, Q sequences, D channels, W taps, J places of tokens and of the W - 1 inputs before
each sequence, B channels of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_policy.recurrence import kernels
from megatron_policy.recurrence.chunks import wide
from megatron_policy.recurrence.recomputed import recomputed

BLOCK = 2**24
"""Numbers of a block: places times channels."""


@dataclass(frozen=True)
class Windows:
    """The places of all sequences one after another, each behind the W - 1 inputs before it."""

    sequences: tuple[range, ...]
    taps: int
    source_J: torch.Tensor
    """What stands at each place: a token, or N + q * (W - 1) + i for the i-th input before q."""
    place_N: torch.Tensor
    """The place of each token."""
    last_QW: torch.Tensor
    """The places of the last W - 1 inputs of each sequence."""

    @classmethod
    def of(cls, sequences: Sequence[range], taps: int) -> Windows:
        """Made on the CPU."""
        tokens, back = sum(map(len, sequences)), taps - 1
        parts = []
        for number, one in enumerate(sequences):
            parts.append(torch.arange(back) + tokens + number * back)
            parts.append(torch.arange(one.start, one.stop, one.step))
        source_J = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
        place = torch.empty_like(source_J)
        place[source_J] = torch.arange(source_J.numel())
        ends = torch.tensor(list(accumulate(len(one) + back for one in sequences)))
        last_QW = ends.long().unsqueeze(1) - back + torch.arange(back)
        return cls(tuple(sequences), taps, source_J, place[:tokens], last_QW)

    @property
    def back(self) -> int:
        """W - 1, the inputs before a token that it sees."""
        return self.taps - 1

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Windows:
        """The same with its indices where `move` puts them."""
        indices = (self.source_J, self.place_N, self.last_QW)
        source_J, place_N, last_QW = map(move, indices)
        return replace(self, source_J=source_J, place_N=place_N, last_QW=last_QW)


def convolve(
    x_ND: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    windows: Windows | kernels.Line,
    past_QWD: torch.Tensor | None = None,
    silu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution of each sequence, followed by SiLU if `silu`, and the last W - 1 inputs of
    each sequence, both in the dtype of `x_ND`. The sums are in fp32 and rounded once.

    `past_QWD` are the W - 1 inputs before each sequence, zeros by default. A `Line` in place of
    windows has kernels compute it.
    """
    if isinstance(windows, kernels.Line):
        return kernels.convolve(x_ND, weight_DW, bias_D, windows, past_QWD, silu)
    assert windows.taps == weight_DW.size(1), (windows.taps, weight_DW.shape)
    if past_QWD is None:
        past_QWD = x_ND.new_zeros(len(windows.sequences), windows.back, x_ND.size(1))
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Convolve.apply
    return apply(x_ND, weight_DW, bias_D, past_QWD.to(x_ND.dtype), windows, silu)


def convolve_step(
    x_QD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    past_QWD: torch.Tensor,
    silu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`convolve` of one more token of each sequence."""
    joined_QWD = torch.cat([past_QWD, x_QD.unsqueeze(1)], 1)
    out_QD = (wide(joined_QWD) * wide(weight_DW.T)).sum(1)
    out_QD = out_QD if bias_D is None else out_QD + wide(bias_D)
    return (F.silu(out_QD) if silu else out_QD).to(x_QD.dtype), joined_QWD[:, 1:]


def gated_convolve(
    before_ND: torch.Tensor,
    after_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    windows: Windows | kernels.Line,
    past_QWD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`after * convolution(before * x)` without SiLU, and the convolution's last inputs."""

    def compute(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before, after, x, weight, bias, past = inputs
        out_ND, last_QWD = convolve(before * x, weight, bias, windows, past, silu=False)
        return after * out_ND, last_QWD

    return recomputed(compute, before_ND, after_ND, x_ND, weight_DW, bias_D, past_QWD)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_DW: torch.Tensor,
        bias_D: torch.Tensor | None,
        past_QWD: torch.Tensor,
        windows: Windows,
        silu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x_ND, weight_DW, bias_D, past_QWD)
        ctx.windows, ctx.silu = windows, silu
        out_ND, last_QWD = torch.empty_like(x_ND), torch.empty_like(past_QWD)
        for block in _blocks(windows, x_ND):
            joined_JB = _join(x_ND, past_QWD, windows, block)
            sums = _sums(joined_JB, weight_DW[block], bias_D, block)[windows.place_N - windows.back]
            out_ND[:, block] = (F.silu(sums) if silu else sums).to(x_ND.dtype)
            last_QWD[..., block] = joined_JB[windows.last_QW].to(x_ND.dtype)
        return out_ND, last_QWD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: torch.Tensor, grad_last_QWD: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x_ND, weight_DW, bias_D, past_QWD = ctx.saved_tensors
        windows: Windows = ctx.windows
        grad_x_ND, grad_past_QWD = torch.empty_like(x_ND), torch.empty_like(past_QWD)
        grad_weight_DW = torch.empty_like(weight_DW)
        grad_bias_D = None if bias_D is None else torch.empty_like(bias_D)
        for block in _blocks(windows, x_ND):
            joined_JB, taps_BW = _join(x_ND, past_QWD, windows, block), wide(weight_DW[block])
            grad_sums = torch.zeros_like(joined_JB[windows.back :])
            grad_sums[windows.place_N - windows.back] = wide(grad_ND[:, block])
            if ctx.silu:
                sums = _sums(joined_JB, weight_DW[block], bias_D, block)
                gate = sums.sigmoid()
                grad_sums.mul_(gate * (1 + sums * (1 - gate)))
            grad_joined_JB = torch.zeros_like(joined_JB)
            grad_joined_JB.index_put_(
                (windows.last_QW,), wide(grad_last_QWD[..., block]), accumulate=True
            )
            count = grad_sums.size(0)
            for tap in range(windows.taps):
                shifted_JB = joined_JB[tap : tap + count]
                grad_weight_DW[block, tap] = (grad_sums * shifted_JB).sum(0).to(weight_DW.dtype)
                grad_joined_JB[tap : tap + count].addcmul_(grad_sums, taps_BW[:, tap])
            if grad_bias_D is not None:
                grad_bias_D[block] = grad_sums.sum(0).to(grad_bias_D.dtype)
            by_source = torch.empty_like(grad_joined_JB)
            by_source[windows.source_J] = grad_joined_JB
            grad_x_ND[:, block] = by_source[: x_ND.size(0)].to(x_ND.dtype)
            past = by_source[x_ND.size(0) :].unflatten(0, past_QWD.shape[:2])
            grad_past_QWD[..., block] = past.to(past_QWD.dtype)
        return grad_x_ND, grad_weight_DW, grad_bias_D, grad_past_QWD, None, None


def _blocks(windows: Windows, x_ND: torch.Tensor) -> Iterator[slice]:
    width = max(1, BLOCK // max(1, windows.source_J.numel()))
    return (slice(start, start + width) for start in range(0, x_ND.size(1), width))


def _join(
    x_ND: torch.Tensor, past_QWD: torch.Tensor, windows: Windows, block: slice
) -> torch.Tensor:
    """The inputs at all places, `wide`."""
    both = torch.cat([x_ND[:, block], past_QWD[..., block].flatten(0, 1)])
    return wide(both[windows.source_J])


def _sums(
    joined_JB: torch.Tensor, weight_BW: torch.Tensor, bias_D: torch.Tensor | None, block: slice
) -> torch.Tensor:
    """What the convolution gives at all places but the first W - 1; of no use at inputs before a
    sequence.
    """
    taps_BW = wide(weight_BW)
    count = joined_JB.size(0) - taps_BW.size(1) + 1
    out = joined_JB[:count] * taps_BW[:, 0]
    for tap in range(1, taps_BW.size(1)):
        out.addcmul_(joined_JB[tap : tap + count], taps_BW[:, tap])
    return out if bias_D is None else out.add_(wide(bias_D[block]))
