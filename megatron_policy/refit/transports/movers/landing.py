"""Where a mover puts what trainers send to an engine rank: the stream of each after another, in
memory that the engine rank has for it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_policy.errors import ConfigError, MissingPackageError, RefitError
from megatron_policy.refit.buffers import align
from megatron_policy.refit.transports.movers.mover import Mover
from megatron_policy.refit.transports.movers.named import find_mover


class LandingPlace(NamedTuple):
    """Where a trainer's stream belongs at an engine rank: in which memory, and from where on."""

    to: bytes
    at: int

    @classmethod
    def from_words(cls, words: Any, sender: int) -> LandingPlace:
        """That of a trainer, as `Landing.prepare` says it; RefitError for other words."""
        try:
            return cls(base64.b64decode(words["to"], validate=True), int(words["at"][sender]))
        except (ValueError, TypeError, LookupError) as error:
            raise RefitError(
                f"an engine does not say where its weights are to be written: {error}. Use the "
                "same version of megatron-policy on both sides"
            ) from error


class Landing:
    """An engine rank's memory, kept from refit to refit until one fails: a trainer that was stopped
    and goes on later then writes to memory that nobody reads.
    """

    def __init__(self) -> None:
        self._mover: Mover | None = None
        self._name, self._starts = "", list[int]()

    def prepare(self, name: str, sizes: Sequence[int], timeout_s: float) -> dict[str, Any]:
        """Have memory for a stream of so many bytes of each trainer, written by movers of that
        name; what trainers are to be told of it. RefitError if it cannot be had.
        """
        self._starts, end = [], 0
        for size in sizes:
            self._starts.append(end)
            end += align(size)
        if self._mover is None or self._name != name or self._mover.memory.numel() < end:
            self.close()
            try:
                self._mover = find_mover(name)(max(1, end), timeout_s, lambda: None)
            except (ConfigError, MissingPackageError) as error:
                raise RefitError(str(error)) from error
            self._name = name
        to = base64.b64encode(self._mover.description).decode()
        return {"to": to, "at": self._starts}

    def part(self, sender: int, nbytes: int) -> Tensor:
        """What a trainer has written."""
        assert self._mover is not None
        return self._mover.memory[self._starts[sender] : self._starts[sender] + nbytes]

    def close(self) -> None:
        """Release the memory."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()
