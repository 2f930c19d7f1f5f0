"""A mixer that hands a state on from token to token: what gated delta nets, Mamba2 and short
convolutions have in common.

One projection gives all that the mixer reads, in sections of heads. Some of them pass through a
causal convolution that treats each channel alone, and another projection ends it. Context-parallel
ranks, which share tokens, exchange them for heads: each then has all tokens of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, TypeVar

from .part import FP32, LayerPart, Linear, Linears, PartBytes, Place, RankShare, Slabs, SplitCount

_R = TypeVar("_R", bound="Recurrence")


class HeadRows(NamedTuple):
    """Rows of a projection that ranks share by heads: names of sizes, or numbers."""

    heads: str
    rows: str | int
    """Of each head."""
    name: str
    """What checkpoints of Megatron-Core's format call them, which have them apart."""


class Recurrence(LayerPart):
    """Such a mixer. It sees all tokens and has no positions."""

    window: ClassVar[None] = None
    rope: ClassVar[None] = None
    place: ClassVar[str]
    """The mixer's name within a decoder layer."""
    taps: int
    """How many tokens the convolution sees, this one included."""

    @property
    def context_splits(self) -> tuple[SplitCount, ...]:
        return self.splits

    @property
    @abstractmethod
    def projected_size(self) -> int:
        """Output rows of the first projection."""

    @property
    @abstractmethod
    def convolved_size(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """Inputs of the last projection."""

    @property
    @abstractmethod
    def memory_size(self) -> int:
        """Elements of the state of a sequence, which is kept in fp32; 0: there is only the
        convolution's.
        """

    @property
    @abstractmethod
    def steps_size(self) -> int:
        """Numbers of a token in fp32 that say how the state changes."""

    @property
    def norm_factors(self) -> int:
        """Intermediate vectors of `inner_size` that gate and norm hold, in fp32, to differentiate
        them: the activation of the gate, and the output after each factor.
        """
        return 3

    @abstractmethod
    def split(self: _R, tp: int, cp: int) -> _R:
        """What each of so many tensor- and context-parallel ranks computes of it."""

    @abstractmethod
    def count_memory_flops(self) -> int:
        """Operations of a token on the state."""

    @abstractmethod
    def count_slab(self, slabs: Slabs) -> int:
        """Numbers in fp32 that the scan holds of the chunks that it computes at once, to
        differentiate them.
        """

    @property
    def first(self) -> str:
        """The first projection."""
        return f"{self.place}.in_proj"

    @property
    def last(self) -> str:
        """The last one."""
        return f"{self.place}.out_proj"

    def list_linears(self, hidden_size: int) -> Linears:
        into = Linear(self.first, hidden_size * self.projected_size)
        out = Linear(self.last, self.inner_size * hidden_size, Place.WHOLE, Place.STREAM)
        return (into,), (out,)

    def count_core_flops(self, lengths: Iterable[int]) -> int:
        """Operations of the convolution and on the state, token by token."""
        return sum(lengths) * (2 * self.taps * self.convolved_size + self.count_memory_flops())

    def count_exchanged(self, tp: int, cp: int) -> int:
        """Channels of a token that a context-parallel rank sends to each other one: what heads of
        its there read, and what it reads of theirs.
        """
        own = self.split(tp, cp)
        return own.projected_size + own.inner_size

    def count_cached(self, tokens: int, width: int) -> int:
        """Bytes that generation keeps of a sequence, however long: the last inputs of the
        convolution, and the state.
        """
        return (self.taps - 1) * self.convolved_size * width + FP32 * self.memory_size

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        """What the projection gives, what the scan reads with its states, what it gives, and the
        input of the last projection.
        """
        own, tokens = self.split(share.tp, share.cp), share.whole * share.cp
        context = own.inner_size * tokens * share.width * share.training.keep(self.last)
        if not (needed or share.training.adapted(self.first)):
            return PartBytes(context)
        kept, again = own.count_scan(tokens, share)
        projected = own.projected_size * tokens * share.width
        return PartBytes(projected + kept + context, again=max(0, again - context))

    def count_scan(self, tokens: int, share: RankShare) -> tuple[int, int]:
        """Bytes that convolution, scan and gate keep besides the projections' outputs and inputs,
        and the most that is held when one of them is computed again.
        """
        slabs, given = share.slabs(self.count_slab), self.inner_size * tokens * share.width
        past = slabs.sequences * (self.taps - 1)
        kept = given + (tokens + past) * self.convolved_size * share.width
        kept += FP32 * (self.steps_size * tokens + self.memory_size * slabs.states)
        # In fp32 output and gate are those that are kept.
        factors = self.norm_factors + 2 * (share.width != FP32)
        gate = factors * FP32 * self.inner_size * tokens
        return kept, max(gate, FP32 * self.count_slab(slabs) - given)
