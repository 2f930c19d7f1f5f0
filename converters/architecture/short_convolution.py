"""A gated short convolution: each channel sees the last few tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from .checks import check_sizes
from .part import RankShare, Slabs, SplitCount
from .recurrence import HeadRows, Recurrence

INTO, OUT, INPUT = (HeadRows("channels", 1, name) for name in ("B", "C", "x"))
"""The gate before the convolution, the one after it, and what is convolved."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Recurrence):
    """Its projection gives an input and two gates, which multiply what goes into the convolution
    and what comes out of it.
    """

    channels: int
    taps: int
    bias: bool = False
    """On both projections and on the convolution."""

    place: ClassVar[str] = "self_attention"

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "taps", of="short_convolution.")

    @property
    def projected_size(self) -> int:
        return 3 * self.channels

    @property
    def convolved_size(self) -> int:
        return self.channels

    @property
    def inner_size(self) -> int:
        return self.channels

    @property
    def memory_size(self) -> int:
        return 0

    @property
    def steps_size(self) -> int:
        return 0

    @property
    def sizes(self) -> tuple[object, ...]:
        return self.channels, self.taps, self.bias

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        return (SplitCount(self.channels, "channels of a short convolution"),)

    def split(self, tp: int, cp: int) -> ShortConvolution:
        return replace(self, channels=self.channels // (tp * cp))

    def count_slab(self, slabs: Slabs) -> int:
        return 0

    def count_scan(self, tokens: int, share: RankShare) -> tuple[int, int]:
        """All is computed again: the convolution's input, and its output."""
        past = share.slabs(self.count_slab).sequences * (self.taps - 1)
        return 0, (2 * tokens + past) * self.channels * share.width

    def count_memory_flops(self) -> int:
        return 0
