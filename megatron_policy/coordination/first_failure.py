"""The first failure of any rank, which all ranks raise: where it is published and read."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_policy.coordination.store import StoreCalls


@dataclass(frozen=True)
class FirstFailure:
    """The first failure in what all ranks do together; `key` is its own in the store."""

    store: dist.Store
    key: str
    call: StoreCalls

    def publish(self, words: str) -> str:
        """Publish why this rank fails, unless one has failed before; return the first failure."""
        first = self.call(lambda: self.store.compare_set(self.key, "", words))
        return first.decode()

    def read(self) -> str:
        """The first failure; empty if no rank has failed."""

        def look() -> bytes:
            return self.store.get(self.key) if self.store.check([self.key]) else b""

        return self.call(look).decode()
