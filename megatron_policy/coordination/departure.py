"""Leaving an operation together: no rank leaves while another still needs it. Many launchers keep
the store in the process of rank 0, and the store ends with that process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.store import StoreCalls
from megatron_policy.errors import CheckpointError, RefitError

SHUTDOWN_S = 30.0
"""How long rank 0 waits for the others when it shuts down."""


@dataclass(frozen=True)
class Departure:
    """One rank's end of an operation; `root` is the operation's own prefix in the store."""

    store: dist.Store
    root: str
    rank: int
    size: int
    call: StoreCalls
    heartbeat: Heartbeat

    def leave_together(self, silence_s: float, failure: Callable[[], str]) -> str:
        """Return "" when every rank is done; on rank 0, when no rank calls the store any more.

        Otherwise return the reason: no heartbeat for `silence_s` seconds, or what `failure`
        returns, which is why another rank gave up.
        """
        if self.size == 1:
            return ""
        try:
            return self._leave(silence_s, failure)
        except (CheckpointError, RefitError) as error:
            return str(error)

    def shut_down(self, timeout_s: float, failure: Callable[[], str]) -> None:
        """This rank needs nothing any more. Rank 0 waits until all others have said the same, or
        `failure` returns why one of them has given up.
        """
        if self.rank != 0:
            self._publish_gone()
        elif self.size > 1:
            self._wait_until_gone(timeout_s, failure)

    def _leave(self, silence_s: float, failure: Callable[[], str]) -> str:
        done, reason = f"{self.root}/done", ""

        def over() -> bool:
            nonlocal reason
            if self.call(lambda: self.store.add(done, 0)) >= self.size:
                return True
            reason = failure()
            return bool(reason)

        self.call(lambda: self.store.add(done, 1))
        silent = not self.heartbeat.wait_while_alive(over, silence_s)
        if self.rank != 0:
            self._publish_gone()
        elif not silent and not reason:
            silent = not self._wait_until_gone(silence_s)
            self.call(lambda: self.store.delete_key(done))
        return f"a rank gave no sign of life for {silence_s:g} s" if silent else reason

    def _publish_gone(self) -> None:
        # The last call of this rank. `set` gets no answer, so rank 0 can go at once.
        self.call(lambda: self.store.set(self._gone(self.rank), ""))

    def _wait_until_gone(self, silence_s: float, failure: Callable[[], str] = lambda: "") -> bool:
        keys = [self._gone(rank) for rank in range(1, self.size)]
        gone = self.heartbeat.wait_while_alive(
            lambda: self.call(lambda: self.store.check(keys)) or bool(failure()), silence_s
        )
        for key in keys:
            self.call(partial(self.store.delete_key, key))
        return gone

    def _gone(self, rank: int) -> str:
        return f"{self.root}/gone/{rank}"
