"""Messages of the ranks of a policy to each other during a refit, in the store they share."""

from __future__ import annotations

import torch.distributed as dist

from megatron_policy.coordination.store import StoreCalls
from megatron_policy.errors import RefitError

_SHOWN_REASONS = 3


class RankMessages:
    """One rank's messages, and those of the others, below the same `root` in the store."""

    def __init__(self, store: dist.Store, root: str, rank: int, call: StoreCalls) -> None:
        self._store, self._root, self._rank, self._call = store, root, rank, call
        self._last = ""

    def publish(self, name: str, words: str) -> None:
        """Publish a message to all ranks, in place of the last one of this rank."""
        before, self._last = self._last, f"{self._root}/message/{name}"
        if before:
            self._call(lambda: self._store.delete_key(before))
        self._call(lambda: self._store.set(self._last, words))

    def read(self, name: str) -> str:
        """A message that a rank has published; RefitError if it has published another since."""
        key = f"{self._root}/message/{name}"
        if self._call(lambda: self._store.check([key])):
            message: bytes = self._call(lambda: self._store.get(key))
            return message.decode()
        raise RefitError("the other ranks have already aborted")

    def publish_failure(self, words: str) -> None:
        """Publish why this rank has failed."""
        self._call(lambda: self._store.set(self._reason(self._rank), words))

    def failures(self, ranks: list[int]) -> str:
        """Why these ranks have failed: the reasons of the first few."""

        def reason(rank: int) -> str:
            return f"rank {rank}: {self._store.get(self._reason(rank)).decode()}"

        shown = self._call(lambda: [reason(rank) for rank in ranks[:_SHOWN_REASONS]])
        more = f" ({len(ranks)} ranks failed)" if len(ranks) > _SHOWN_REASONS else ""
        return "; ".join(shown) + more

    def _reason(self, rank: int) -> str:
        return f"{self._root}/failed/{rank}"
