"""Kimi delta attention (Kimi Team 2025, "Kimi Linear"): a gated delta net in whose state each
channel of the key decays by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from .checks import check_sizes
from .part import Linear, Linears, PartBytes, Place, RankShare, Slabs, SplitCount
from .recurrence import HeadRows, Recurrence

QUERY, KEY, VALUE, GATE, ALPHA = (
    HeadRows("num_heads", "head_dim", name) for name in ("query", "key", "value", "z", "alpha")
)
BETA = HeadRows("num_heads", 1, "beta")


@dataclass(frozen=True, kw_only=True)
class ChannelDeltaNet(Recurrence):
    """Per head a state of as many key as value channels, and a query, a key and a value, which are
    convolved. The gates of outputs and the decays come through projections of low rank, whose inner
    width is that of a head.
    """

    num_heads: int
    head_dim: int
    taps: int

    place: ClassVar[str] = "self_attention"

    def __post_init__(self) -> None:
        names = "num_heads", "head_dim", "taps"
        check_sizes(self, *names, "projected_size", of="channel_delta_net.")

    @property
    def projected_size(self) -> int:
        return self.convolved_size + self.num_heads

    @property
    def convolved_size(self) -> int:
        return 3 * self.inner_size

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def memory_size(self) -> int:
        return self.inner_size * self.head_dim

    @property
    def steps_size(self) -> int:
        return self.num_heads + self.inner_size

    @property
    def sizes(self) -> tuple[object, ...]:
        return self.num_heads, self.head_dim, self.taps

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        return (SplitCount(self.num_heads, "heads of a delta net"),)

    def split(self, tp: int, cp: int) -> ChannelDeltaNet:
        return replace(self, num_heads=self.num_heads // (tp * cp))

    def list_linears(self, hidden_size: int) -> Linears:
        (first,), last = super().list_linears(hidden_size)
        rank, inner = self.head_dim, self.inner_size
        names = [f"{self.place}.{name}" for name in ("gate", "decay")]
        down = (Linear(f"{n}_down", hidden_size * rank, out=Place.STREAM) for n in names)
        up = (Linear(f"{n}_up", rank * inner) for n in names)
        return (first, *down), tuple(up), last

    def count_slab(self, slabs: Slabs) -> int:
        """Mostly what pairs of a part of a chunk have decayed by in each channel, as measured."""
        token = 100 * self.inner_size + self.num_heads * (3 * slabs.chunk + 3)
        return token * slabs.tokens + 2 * self.memory_size * slabs.chunks

    def count_memory_flops(self) -> int:
        """What the state has for the key, its correction, and what it has for the query."""
        return 6 * self.memory_size

    def count_exchanged(self, tp: int, cp: int) -> int:
        """Gates and decays besides."""
        return super().count_exchanged(tp, cp) + 2 * self.inner_size // (tp * cp)

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        """Gates and decays besides, and what their projections take."""
        kept = super().count_kept(share, needed)
        if not needed:
            return kept
        wide = 2 * self.inner_size // share.tp * share.whole
        own = share.width * (wide + 2 * self.head_dim * share.stream)
        return kept._replace(inner=kept.inner + own)
