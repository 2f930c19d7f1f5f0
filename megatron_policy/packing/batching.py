"""How microbatches are made: of rows, of similar rows, or of packed sequences."""

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
    `tokens` including their padding. `packed`: of concatenated sequences, at most `tokens` in
    total; `algorithm` chooses which, ours if it is None.

    A dynamic microbatch is as wide as its longest row, rounded up to `round_to`. Each packed
    sequence is rounded up to `round_to`, and their total to `row_multiple`, as the layout requires.
    `key` is the configuration key of `tokens`, for messages.

    `rows_per_group` rows that follow each other, from row 0 on, stay together: in one microbatch,
    in their order. The pictures of a microbatch have at most `patches` patches, those that rows
    share counted for each of them.
    """

    kind: Kind
    tokens: int = 0
    round_to: int = 1
    algorithm: str | None = None
    key: str = "tokens"
    row_multiple: int = 1
    rows_per_group: int = 1
    patches: int | None = None

    @property
    def capacity(self) -> int:
        """The most positions of a microbatch, including padding."""
        return self.tokens // self.row_multiple * self.row_multiple

    def size(self, length: int, width: int | None = None) -> int:
        """Positions that a sequence of `length` tokens takes with its own padding; in a padded
        microbatch of a tensor of `width` positions, at most as many as the width needs.
        """
        if self.kind == "packed" or width is None:
            return round_up(length, self.round_to)
        widest = round_up(width, self.row_multiple)
        return min(round_up(max(length, min(width, NARROWEST)), self.round_to), widest)

    def room(self, positions: int, patches: int) -> int:
        """Of the capacity of a packed microbatch, what sequences take with this many positions and
        patches: the larger share of both. Rows that fit by it fit, but not all that fit do.
        """
        if self.patches is None:
            return positions
        return max(positions, -(-patches * self.capacity // self.patches))

    def check(
        self, lengths: Sequence[int], width: int | None = None, patches: Sequence[int] = ()
    ) -> None:
        """BatchError naming the first row or group of rows that does not fit into a microbatch."""
        self.check_whole_groups(len(lengths), f"a batch of {len(lengths)} rows")
        group = self.rows_per_group
        for first in range(0, len(patches), group):
            self.check_patches(range(first, first + group), patches[first : first + group])
        if self.kind == "padded":
            return
        room = "" if self.capacity == self.tokens else f" (room for {self.capacity})"
        sizes = [self.size(length, width) for length in lengths]
        for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            if size > self.capacity:
                padded = "" if size == length else f" ({size} with padding)"
                raise BatchError(
                    f"row {row} has {length} tokens{padded}, more than {self.key}={self.tokens}"
                    f"{room}: raise it or truncate the row"
                )
        for first in range(0, len(sizes), group):
            own = sizes[first : first + group]
            taken = sum(own) if self.kind == "packed" else group * max(own)
            if taken > self.capacity:
                raise BatchError(
                    f"rows {first} to {first + group - 1}, which the loss reads together (its "
                    f"rows_per_group), take {taken} tokens with padding, more than "
                    f"{self.key}={self.tokens}{room}: raise it or truncate the rows"
                )

    def check_whole_groups(self, rows: int, what: str, parts: int = 1) -> None:
        """BatchError unless `rows` rows, which are the share of one of `parts` in `what`, are whole
        groups.
        """
        group = self.rows_per_group
        if rows % group:
            raise BatchError(
                f"{what} cuts a group of {group} rows, which the loss reads together (its "
                f"rows_per_group): make it a multiple of {group * parts}"
            )

    def check_patches(self, rows: Sequence[int], patches: Sequence[int]) -> None:
        """BatchError unless these rows, with these patches, can be one microbatch."""
        found = sum(patches)
        if self.patches is not None and found > self.patches:
            these, further = f"row {rows[0]} alone", ""
            if len(rows) > 1:
                these = f"rows {', '.join(map(str, rows))}, which make one microbatch,"
                further = ", or put fewer rows into a microbatch"
            raise BatchError(
                f"the pictures of {these} have {found} patches, more than "
                f"max_patches_per_microbatch={self.patches}: raise it, or make pictures smaller"
                f"{further}"
            )
