"""A part of a decoder layer: what it is asked, also about a rank's share of a microbatch, and its
answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

FP32, INT64 = 4, 8


class SplitCount(NamedTuple):
    """A number that tensor-parallel ranks must divide or, with `multiples`, also can be a multiple
    of; None where nothing is said of multiples.
    """

    number: int
    what: str
    multiples: bool | None = None

    def allows(self, ranks: int) -> bool:
        """Whether so many ranks can share it."""
        return self.number % ranks == 0 or (bool(self.multiples) and ranks % self.number == 0)


class Place(Enum):
    """Which tokens a rank has at one end of a linear layer."""

    STREAM = "stream"
    """Those of the residual stream."""
    WHOLE = "whole"
    """All of its context-parallel rank's: tensor-parallel ranks have split channels."""
    ROUTED = "routed"
    """Those of its experts."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a part, by Megatron-Core's name within a decoder layer; experts share one.
    `elements` are those of the matrices by which each token is multiplied.
    """

    name: str
    elements: int
    into: Place = Place.STREAM
    out: Place = Place.WHOLE
    experts: int = 1
    """How many there are, and how many of them each token passes through."""
    chosen: int = 1


Linears = tuple[tuple[Linear, ...], ...]
"""Those of a part in the order in which tokens pass through them; those that read the same are
together.
"""


class Training(Protocol):
    """Which linear layers of a decoder layer have gradients."""

    @property
    def trained(self) -> bool:
        """Whether all weights do."""

    def keep(self, *names: str) -> bool:
        """Whether one of these keeps its input as it is."""

    def adapted(self, *names: str) -> bool:
        """Whether one of these is frozen and has an adapter."""


@dataclass(frozen=True)
class Kernels:
    """Which modules compute a layer."""

    transformer_engine: bool
    fused_activation: bool
    """SwiGLU in one kernel, which keeps nothing but its input."""
    fused_rope: bool = False
    fused_norm: bool = False
    """RMS norms in one kernel, which keeps its input and a number for each vector."""
    fused_dropout: bool = False
    """Dropout in one kernel, whose mask has one byte for each element."""
    one_call: bool = False
    """Attention takes all sequences at once and needs no masks; else there is a call for each tile,
    with a mask unless the tile is square. Softcaps and sinks are computed in tiles anyway.
    """


@dataclass(frozen=True)
class Tiles:
    """Of the causal attention of all sequences of a microbatch on one rank; a tile has Q queries
    and K keys.
    """

    number: int
    """How many calls compute it."""
    keys: int
    """The sum of K over all tiles of each row."""
    scores: int
    """The sum of Q x K."""
    masks: int
    """The sum of Q x K over masks; tiles of one shape share theirs."""


class Slabs(NamedTuple):
    """How a recurrence goes through all tokens of a microbatch: in chunks, several of which are
    computed at once.
    """

    sequences: int
    chunk: int
    """Tokens of a chunk."""
    chunks: int
    """How many are computed at once, at most."""
    states: int
    """States of sequences that are kept from one of these to the next."""

    @property
    def tokens(self) -> int:
        """Those that are computed at once, at most, with what fills their chunks."""
        return self.chunk * self.chunks


@dataclass(frozen=True)
class RankShare:
    """What a rank computes of a microbatch, and with what."""

    stream: int
    """Tokens of the residual stream."""
    whole: int
    """Tokens where tensor-parallel ranks have split channels."""
    positions: int
    """How many tokens have cosines and sines of their own."""
    hidden_size: int
    width: int
    """Bytes of an activation."""
    tp: int
    cp: int
    expert_tp: int
    sequence_parallel: bool
    kernels: Kernels
    training: Training
    tiles: Callable[[int | None, bool], Tiles]
    """Of attention with this window, whose scores are computed or not."""
    norm: Callable[[int], int]
    """Bytes that a norm keeps of a vector of this size, without its output."""
    slabs: Callable[[Callable[[Slabs], int]], Slabs]
    """Of a scan that holds so many numbers of what it computes at once."""

    def tokens(self, place: Place, chosen: int = 1) -> int:
        """How many tokens there are; the tensor-parallel ranks of an expert gather theirs."""
        if place is Place.ROUTED:
            return self.stream * chosen * (self.expert_tp if self.sequence_parallel else 1)
        return self.stream if place is Place.STREAM else self.whole


class CoreBytes(NamedTuple):
    """Bytes of core attention, its inputs and the input of the output projection included."""

    total: int = 0
    kept: int = 0
    """Where it is computed again."""
    again: int = 0
    """While it is computed again; the output projection's input is gone by then."""

    @classmethod
    def of(cls, inputs: int, inside: int, context: int, total: int) -> CoreBytes:
        """`inputs` are queries, keys and values, `inside` what only core attention keeps, `context`
        the input of the output projection.
        """
        return cls(total, inputs + context, inputs + inside)


class PartBytes(NamedTuple):
    """Bytes that a part keeps for its backward pass, without its input and its adapters."""

    inner: int
    core: CoreBytes = CoreBytes()
    again: int = 0
    """Besides, at most, while its backward pass runs: what it always computes again."""


class LayerPart(ABC):
    """What mixes the tokens of a layer, or what each of them then passes through: a frozen value,
    which layers share.
    """

    norm_apart: ClassVar[bool] = False
    """The norm of its input is a module of its own, also with Transformer Engine, which otherwise
    has it inside the linear layer that reads it.
    """
    computed_again: ClassVar[bool] = False
    """Megatron-Core can compute it again as a whole."""
    keeps_input: ClassVar[bool] = False
    """It keeps its input although its weights are frozen."""
    needs_sequence_parallel: ClassVar[str] = ""
    """What of it tensor-parallel ranks can only split with sequence parallelism."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[object, ...]:
        """What decides which parameters it has and their shapes, the same in all layers."""

    @property
    @abstractmethod
    def splits(self) -> tuple[SplitCount, ...]:
        """What limits the number of tensor-parallel ranks."""

    @property
    def context_splits(self) -> tuple[SplitCount, ...]:
        """What limits the product of the numbers of tensor- and of context-parallel ranks."""
        return ()

    @abstractmethod
    def list_linears(self, hidden_size: int) -> Linears:
        """Its linear layers."""

    @abstractmethod
    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        """Bytes kept for the backward pass; `needed` says whether the input needs gradients."""
