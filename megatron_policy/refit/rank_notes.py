"""What the ranks of a policy tell each other, in the store where they met, during a refit."""

from __future__ import annotations

import torch.distributed as dist

from megatron_policy.errors import RefitError
from megatron_policy.refit.parting import Asked

_SHOWN_REASONS = 3


class RankNotes:
    """One rank's notes, and what it reads of the others' in the same `root` of the store."""

    def __init__(self, store: dist.Store, root: str, rank: int, asked: Asked) -> None:
        """`asked` asks the store, bounded in time."""
        self._store, self._root, self._rank, self._asked = store, root, rank, asked
        self._last = ""

    def write(self, name: str, words: str) -> None:
        """Leave a note that all are to read, in place of the last one of this rank."""
        before, self._last = self._last, f"{self._root}/told/{name}"
        if before:
            self._asked(lambda: self._store.delete_key(before))
        self._asked(lambda: self._store.set(self._last, words))

    def read(self, name: str) -> str:
        """A note that a rank has left before; RefitError if that rank has gone on to another."""
        key = f"{self._root}/told/{name}"
        if self._asked(lambda: self._store.check([key])):
            note: bytes = self._asked(lambda: self._store.get(key))
            return note.decode()
        raise RefitError("the others have given this up already")

    def give_reason(self, words: str) -> None:
        """Say why this rank has failed."""
        self._asked(lambda: self._store.set(self._reason(self._rank), words))

    def reasons(self, ranks: list[int]) -> str:
        """Why these have failed, the first few of them in words."""

        def reason(rank: int) -> str:
            return f"rank {rank}: {self._store.get(self._reason(rank)).decode()}"

        shown = self._asked(lambda: [reason(rank) for rank in ranks[:_SHOWN_REASONS]])
        more = f" ({len(ranks)} ranks failed)" if len(ranks) > _SHOWN_REASONS else ""
        return "; ".join(shown) + more

    def _reason(self, rank: int) -> str:
        return f"{self._root}/reason/{rank}"
