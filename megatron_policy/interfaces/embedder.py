"""What enters the first layers of a model, as its head is what leaves the last one.

Shapes: B rows and S positions of the caller, T positions that a context-parallel rank computes, R
rows of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.packing.tokens import Blocks


class Entering(NamedTuple):
    """Hidden states, in the form in which the first layer takes them on this rank."""

    hidden: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    """What is added to the outputs of the first layers, in the same form, one after another."""


class Embedder(Protocol):
    """It can read what the rows of a microbatch carry under the keys that the architecture declares
    as `attachments`.
    """

    @property
    def attachments(self) -> tuple[str, ...]:
        """Those keys that it reads: all that the architecture declares."""

    def embed(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        """The hidden states of tokens that are nothing but text; only where the embedding is."""

    def enter(self, tokens_RT: torch.Tensor, microbatch: Microbatch) -> Entering:
        """The same for this context-parallel rank's tokens of `microbatch`, with what its rows
        carry. Weights of its own it reads by calling their module, when an overlapped gather
        delivers them.
        """

    def positions(self, microbatch: Microbatch) -> torch.Tensor | None:
        """int64 `[B, S]`: the position of each token of the caller's rows, the same on every rank,
        or `[B, S, 3]` if three positions of a token turn its heads; None if each row's tokens are
        numbered from 0.
        """

    def find_blocks(self, microbatch: Microbatch) -> Blocks:
        """The runs of tokens of each of the caller's rows that see each other in both directions,
        the same on every rank; none at all if every token sees none that follows it.
        """


@dataclass(frozen=True)
class TokenEmbedder:
    """The model's own embedding: all is text. See `Embedder`."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    """From tokens `[R, T]` to hidden states."""
    attachments: tuple[str, ...] = ()

    def embed(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        return self.compute(tokens_RT)

    def enter(self, tokens_RT: torch.Tensor, microbatch: Microbatch) -> Entering:
        return Entering(self.compute(tokens_RT))

    def positions(self, microbatch: Microbatch) -> None:
        return None

    def find_blocks(self, microbatch: Microbatch) -> Blocks:
        return ()
