"""How microbatches are to be made: of rows, of similar rows, or of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_policy.errors import BatchError
from megatron_policy.packing.multiples import NARROWEST, round_up

Kind = Literal["padded", "dynamic", "packed"]


@dataclass(frozen=True)
class Batching:
    """`padded`: microbatches of a number of rows. `dynamic`: of rows of similar length, at most
    `tokens` together with their padding. `packed`: of sequences one after another, at most
    `tokens` together; `algorithm` chooses which, ours where it is None.

    A dynamic microbatch is as wide as its longest row, rounded up to `round_to`; a packed sequence
    is rounded up to it on its own, and all of them together to `row_multiple`, as the layout needs
    it. `key` is where `tokens` comes from, for messages.
    """

    kind: Kind
    tokens: int = 0
    round_to: int = 1
    algorithm: str | None = None
    key: str = "tokens"
    row_multiple: int = 1

    @property
    def capacity(self) -> int:
        """Positions of a microbatch at most, padding counted in."""
        return self.tokens // self.row_multiple * self.row_multiple

    def size(self, length: int, width: int | None = None) -> int:
        """Positions that a sequence of `length` tokens takes with its own padding; in a padded
        microbatch of a tensor of `width` positions not more than these need.
        """
        if self.kind == "packed" or width is None:
            return round_up(length, self.round_to)
        widest = round_up(width, self.row_multiple)
        return min(round_up(max(length, min(width, NARROWEST)), self.round_to), widest)

    def check(self, lengths: Sequence[int], width: int | None = None) -> None:
        """BatchError naming the first row that does not fit into a microbatch."""
        if self.kind == "padded":
            return
        for row, length in enumerate(lengths):
            size = self.size(length, width)
            if size > self.capacity:
                padded = "" if size == length else f" ({size} with padding)"
                room = "" if self.capacity == self.tokens else f" (room for {self.capacity})"
                raise BatchError(
                    f"row {row} has {length} tokens{padded}, more than {self.key}={self.tokens}"
                    f"{room}: raise it or truncate the row"
                )
