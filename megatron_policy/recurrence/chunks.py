"""Cuts the sequences of a microbatch into chunks, through which a recurrence goes one by one.

A sequence is the `range` of its tokens among all tokens of a flattened tensor, so padded and packed
ones are the same: those of `[T, R]` with R rows have steps of R. Each sequence has chunks of its
own, and its state begins with it: a chunk never knows two sequences, and what a sequence gives does
not depend on its neighbours.

Shapes: N tokens, Q sequences, C chunks of L places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

SIZE = 64
"""Tokens of a chunk. Within one the work is quadratic, and from one to the next a state is passed
on; kernels have this size too.
"""
TOGETHER = 32
"""Chunks that are computed at once, at most; their intermediate results are held at once."""
HELD = 2**26
"""Of these results, how many there are at most, in fp32, unless one chunk has more."""


def sequences_of(lengths: Iterable[int], rows: int = 1) -> tuple[range, ...]:
    """Where each token of each sequence is among those of `[T, R]` flattened: every row is cut into
    sequences of `lengths`. Ordered by row.
    """
    ends = list(accumulate(lengths, initial=0))
    return tuple(
        range(row + start * rows, row + end * rows, rows)
        for row in range(rows)
        for start, end in pairwise(ends)
    )


def count_together(held: int) -> int:
    """How many chunks are computed at once, each with so many intermediate results."""
    return max(1, min(TOGETHER, HELD // max(1, held)))


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype of states and sums: fp32, or fp64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Slab:
    """Chunks that are computed at once: several steps of all sequences that are that long, or one
    step of some of them.
    """

    chunks: slice
    first: int
    """The first sequence of its first step, in `Chunks.order_Q`."""
    live: tuple[int, ...]
    """How many sequences each of its steps has, which are fewer and fewer."""
    begins: bool
    """Whether its sequences begin with it."""
    full: bool
    """Whether every place of its chunks has a token."""

    @property
    def sequences(self) -> slice:
        """Those of its first step, in `Chunks.order_Q`."""
        return slice(self.first, self.first + self.live[0])


@dataclass(frozen=True)
class Chunks:
    """Chunks of all sequences, numbered by how many of their sequence come before them, and among
    those of the same step the longest sequence first.
    """

    sequences: tuple[range, ...]
    take_CL: torch.Tensor
    """The token at each place of each chunk; N where none is."""
    order_Q: torch.Tensor
    """Sequences, the one with most chunks first."""
    slabs: tuple[Slab, ...]

    @classmethod
    def of(cls, sequences: Sequence[range], size: int = SIZE, together: int = TOGETHER) -> Chunks:
        """Chunks of `size` tokens, at most `together` of them in a slab. Made on the CPU."""
        tokens = sum(map(len, sequences))
        counts = [-(-len(sequence) // size) for sequence in sequences]
        order = sorted(range(len(sequences)), key=lambda q: -counts[q])
        live = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
        before = torch.tensor([0, *accumulate(live)])
        take_CL = torch.full((int(before[-1]), size), tokens)
        for rank, q in enumerate(order):
            places = take_CL.new_full((counts[q] * size,), tokens)
            one = sequences[q]
            places[: len(one)] = torch.arange(one.start, one.stop, one.step)
            take_CL[before[: counts[q]] + rank] = places.view(-1, size)
        full = (take_CL[:, -1] < tokens).tolist()
        order_Q = torch.tensor(order, dtype=torch.long)
        return cls(tuple(sequences), take_CL, order_Q, _slabs(live, full, together))

    @property
    def tokens(self) -> int:
        """N, the tokens of all sequences."""
        return sum(map(len, self.sequences))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Chunks:
        """The same with its indices where `move` puts them."""
        return replace(self, take_CL=move(self.take_CL), order_Q=move(self.order_Q))

    def take(self, x_N: torch.Tensor, slab: Slab) -> torch.Tensor:
        """A slab of `[N, H, ...]`, `wide`, as `[C, H, L, ...]`, with zeros where no token is."""
        take_CL = self.take_CL[slab.chunks]
        if slab.full:
            taken = wide(x_N[take_CL])
        else:
            taken = wide(x_N[take_CL.clamp(max=x_N.size(0) - 1)])
            missing = take_CL == x_N.size(0)
            taken = taken.masked_fill(missing.view(*take_CL.shape, *[1] * (x_N.ndim - 1)), 0)
        return taken.transpose(1, 2).contiguous()

    def put(self, x_CHL: torch.Tensor, slab: Slab, into_N: torch.Tensor) -> None:
        """The inverse of `take` into a tensor of N + 1 tokens, whose last is of no use."""
        into_N[self.take_CL[slab.chunks]] = x_CHL.transpose(1, 2).to(into_N.dtype)


def _slabs(live: list[int], full: list[bool], together: int) -> tuple[Slab, ...]:
    """Steps of `live` sequences each, joined or cut: a slab has at most `together` chunks."""
    slabs: list[Slab] = []
    start = 0
    steps: list[int] = []

    def add(first: int, counts: list[int], step: int) -> None:
        nonlocal start
        chunks = slice(start, start + sum(counts))
        slabs.append(Slab(chunks, first, tuple(counts), step == 0, all(full[chunks])))
        start = chunks.stop

    for step, count in enumerate(live):
        if steps and sum(steps) + count > together:
            add(0, steps, step - len(steps))
            steps = []
        if count > together:
            for first in range(0, count, together):
                add(first, [min(together, count - first)], step)
        else:
            steps = [*steps, count]
    if steps:
        add(0, steps, len(live) - len(steps))
    return tuple(slabs)
