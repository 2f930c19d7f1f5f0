"""How ranks end what they undertook together: none leaves while another still needs it. Rank 0 of
many launchers keeps the store where all meet in its own process, and takes it along.

Knows nothing of what they undertook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.errors import CheckpointError, RefitError

T = TypeVar("T")

SHUTDOWN_S = 30.0
"""How long rank 0 stays for the others when it leaves for good."""

StoreCall = Callable[[Callable[[], Any]], Any]
"""Calls what asks the store, bounded in time, with a RefitError or CheckpointError."""


@dataclass(frozen=True)
class Departure:
    """One rank's end of an undertaking; `root` is the store's prefix for it, new to the store."""

    store: dist.Store
    root: str
    rank: int
    size: int
    call: StoreCall
    heartbeat: Heartbeat

    def leave_together(self, silence_s: float, stopped: Callable[[], str]) -> str:
        """Return "" when every rank is done; on rank 0, when none asks the store any more for this.

        Otherwise why it did not come to that: no sign of life for `silence_s` seconds, or what
        `stopped` the others, in words.
        """
        if self.size == 1:
            return ""
        try:
            return self._leave(silence_s, stopped)
        except (CheckpointError, RefitError) as error:
            return str(error)

    def shut_down(self, patience_s: float) -> None:
        """Nothing at all is needed from here on; rank 0 waits for the others to say so."""
        if self.rank != 0:
            self._publish_gone()
        elif self.size > 1:
            self._await_gone(patience_s)

    def _leave(self, silence_s: float, stopped: Callable[[], str]) -> str:
        done, words = f"{self.root}/done", ""

        def over() -> bool:
            nonlocal words
            if self.call(lambda: self.store.add(done, 0)) >= self.size:
                return True
            words = stopped()
            return bool(words)

        self.call(lambda: self.store.add(done, 1))
        silent = not self.heartbeat.wait_while_alive(over, silence_s)
        if self.rank != 0:
            self._publish_gone()
        elif not silent and not words:
            silent = not self._await_gone(silence_s)
            self.call(lambda: self.store.delete_key(done))
        return f"a rank gave no sign of life for {silence_s:g} s" if silent else words

    def _publish_gone(self) -> None:
        # The last that is asked of the store, which sends no answer to it: rank 0 may go at once.
        self.call(lambda: self.store.set(self._gone(self.rank), ""))

    def _await_gone(self, patience_s: float) -> bool:
        keys = [self._gone(rank) for rank in range(1, self.size)]
        went = self.heartbeat.wait_while_alive(
            lambda: bool(self.call(lambda: self.store.check(keys))), patience_s
        )
        for key in keys:
            self.call(partial(self.store.delete_key, key))
        return went

    def _gone(self, rank: int) -> str:
        return f"{self.root}/gone/{rank}"


class StoreCalls:
    """Asks the store, bounded in time; an error of it is a RefitError.

    A store that does not answer is not waited for again until `forget`.
    """

    def __init__(self, timeout_s: float) -> None:
        """No answer takes longer than `timeout_s` seconds and a quarter of them."""
        self._timeout_s = timeout_s
        self.unanswered = ""
        """Why there was no answer, if so."""

    def __call__(self, step: Callable[[], T]) -> T:
        """What `step` makes of the store; its host, rank 0, may have stopped or gone."""
        if self.unanswered:
            raise RefitError(self.unanswered)
        try:
            # The channels' own timeout gives the better message.
            return run_with_timeout(1.25 * self._timeout_s + 0.5, step)
        except (TimeoutError, dist.DistError) as error:
            self.unanswered = store_failure(error)
            raise RefitError(self.unanswered) from error

    def forget(self) -> None:
        """Something new is undertaken: ask again."""
        self.unanswered = ""


def store_failure(error: Exception) -> str:
    """Why the store did not do what it was asked: its host has stopped, or has left."""
    what = "does not answer" if isinstance(error, TimeoutError) else "has left, or was ended"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"rank 0, where the ranks meet, {what} ({line}); look at its log"
