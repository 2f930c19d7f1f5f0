"""What the ranks of a policy tell each other, in the store where they met, during a refit."""

from __future__ import annotations

import torch.distributed as dist

from megatron_policy.coordination.departure import StoreCall
from megatron_policy.errors import RefitError

_SHOWN_REASONS = 3


class RankMessages:
    """One rank's notes, and what it reads of the others' in the same `root` of the store."""

    def __init__(self, store: dist.Store, root: str, rank: int, call: StoreCall) -> None:
        """`call` asks the store, bounded in time."""
        self._store, self._root, self._rank, self._call = store, root, rank, call
        self._last = ""

    def publish(self, name: str, words: str) -> None:
        """Leave a note that all are to read, in place of the last one of this rank."""
        before, self._last = self._last, f"{self._root}/told/{name}"
        if before:
            self._call(lambda: self._store.delete_key(before))
        self._call(lambda: self._store.set(self._last, words))

    def read(self, name: str) -> str:
        """A note that a rank has left before; RefitError if that rank has gone on to another."""
        key = f"{self._root}/told/{name}"
        if self._call(lambda: self._store.check([key])):
            note: bytes = self._call(lambda: self._store.get(key))
            return note.decode()
        raise RefitError("the others have given this up already")

    def publish_failure(self, words: str) -> None:
        """Say why this rank has failed."""
        self._call(lambda: self._store.set(self._reason(self._rank), words))

    def failures(self, ranks: list[int]) -> str:
        """Why these have failed, the first few of them in words."""

        def reason(rank: int) -> str:
            return f"rank {rank}: {self._store.get(self._reason(rank)).decode()}"

        shown = self._call(lambda: [reason(rank) for rank in ranks[:_SHOWN_REASONS]])
        more = f" ({len(ranks)} ranks failed)" if len(ranks) > _SHOWN_REASONS else ""
        return "; ".join(shown) + more

    def _reason(self, rank: int) -> str:
        return f"{self._root}/reason/{rank}"
