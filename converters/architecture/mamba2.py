"""Mamba2 (Dao and Gu 2024, "Transformers are SSMs"): a state that forgets at a rate of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_policy.errors import ConversionError

from .checks import check_factors, check_sizes
from .part import PartBytes, RankShare, Slabs, SplitCount
from .recurrence import HeadRows, Recurrence

GATE, INPUT = (HeadRows("num_heads", "head_dim", name) for name in ("z", "x"))
INTO, OUT = (HeadRows("groups", "state_size", name) for name in ("B", "C"))
"""Where the state takes a token, and where it is read."""
STEP = HeadRows("num_heads", 1, "dt")


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrence):
    """Per head a state of `state_size` x `head_dim`; heads in a row are a group, which shares where
    its states take tokens and where they are read. Inputs and these two are convolved.
    """

    num_heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool = True
    proj_bias: bool = False
    """On both projections."""
    norm: bool = True
    """The output is normalised over the channels of each group, after its gate."""
    least_step: float = 0.0
    """The steps of the state are not smaller; nor larger than `largest_step`, if that is set."""
    largest_step: float | None = None

    factors: tuple[float, ...] = ()
    """On the sections of what the first projection gives, in their order; (): none."""

    place: ClassVar[str] = "mixer"

    def __post_init__(self) -> None:
        names = "num_heads", "head_dim", "groups", "state_size", "taps"
        check_sizes(self, *names, "projected_size", of="mamba2.")
        check_factors(self, "largest_step")
        if self.num_heads % self.groups:
            raise ConversionError(
                f"{self.num_heads} heads of a Mamba2 layer must be a multiple of its "
                f"{self.groups} groups"
            )

    @property
    def projected_size(self) -> int:
        return self.convolved_size + self.inner_size + self.num_heads

    @property
    def convolved_size(self) -> int:
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def memory_size(self) -> int:
        return self.inner_size * self.state_size

    @property
    def steps_size(self) -> int:
        return self.num_heads

    @property
    def norm_factors(self) -> int:
        return 3 if self.norm else 1

    @property
    def sizes(self) -> tuple[object, ...]:
        heads = self.num_heads, self.head_dim, self.groups, self.state_size, self.taps
        return *heads, self.conv_bias, self.proj_bias, self.norm

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        heads = SplitCount(self.num_heads, "heads of a Mamba2 layer")
        groups = SplitCount(self.groups, "groups of a Mamba2 layer", multiples=True)
        return heads, groups, SplitCount(self.groups * self.state_size, "channels of its groups")

    @property
    def context_splits(self) -> tuple[SplitCount, ...]:
        return self.splits[:2]

    def split(self, tp: int, cp: int) -> Mamba2:
        """The norm is not part of it where ranks share a group's channels."""
        heads, groups = self.num_heads // (tp * cp), max(1, self.groups // (tp * cp))
        norm = self.norm and cp == 1 and tp <= self.groups
        return replace(self, num_heads=heads, groups=groups, norm=norm)

    def count_exchanged(self, tp: int, cp: int) -> int:
        """Tensor-parallel ranks that share a group exchange a part of its rows each."""
        whole = 2 * self.state_size * (tp > self.groups)
        return super().count_exchanged(tp, cp) - whole + whole * self.groups // tp

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        kept, own = super().count_kept(share, needed), self.split(share.tp, share.cp)
        if own.norm is self.norm or not (needed or share.training.adapted(self.first)):
            return kept
        gated = self.inner_size // share.tp * share.whole * share.width
        return kept._replace(inner=kept.inner + gated)

    def count_slab(self, slabs: Slabs) -> int:
        """Inputs, with their steps, and decayed; what takes them and what reads, of each head too,
        and what is read; three products of all pairs of a chunk; twice the state before it.
        """
        heads, groups = self.num_heads, self.groups
        repeated = 2 * heads * self.state_size * (heads != groups)
        of_states = 2 * groups * self.state_size + repeated
        token = 4 * self.inner_size + of_states + heads * (3 * slabs.chunk + 7)
        return token * slabs.tokens + 2 * self.memory_size * slabs.chunks

    def count_memory_flops(self) -> int:
        """What the state takes, and what is read of it."""
        return 4 * self.memory_size
