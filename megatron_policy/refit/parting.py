"""How ranks end what they undertook together: none leaves while another still needs it. Rank 0 of
many launchers keeps the store where all meet in its own process, and takes it along.

Knows nothing of what they undertook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_policy.errors import CheckpointError, RefitError
from megatron_policy.refit.patience import within
from megatron_policy.refit.pulse import Pulse

T = TypeVar("T")

FAREWELL_S = 30.0
"""How long rank 0 stays for the others when it leaves for good."""

Asked = Callable[[Callable[[], Any]], Any]
"""Calls what asks the store, bounded in time, with a RefitError or CheckpointError."""


@dataclass(frozen=True)
class Parting:
    """One rank's end of an undertaking; `root` is the store's prefix for it, new to the store."""

    store: dist.Store
    root: str
    rank: int
    size: int
    asked: Asked
    pulse: Pulse

    def part(self, silence_s: float, stopped: Callable[[], str]) -> str:
        """Return "" when every rank is done; on rank 0, when none asks the store any more for this.

        Otherwise why it did not come to that: no sign of life for `silence_s` seconds, or what
        `stopped` the others, in words.
        """
        if self.size == 1:
            return ""
        try:
            return self._part(silence_s, stopped)
        except (CheckpointError, RefitError) as error:
            return str(error)

    def farewell(self, patience_s: float) -> None:
        """Nothing at all is needed from here on; rank 0 waits for the others to say so."""
        if self.rank != 0:
            self._tell_gone()
        elif self.size > 1:
            self._await_gone(patience_s)

    def _part(self, silence_s: float, stopped: Callable[[], str]) -> str:
        done, words = f"{self.root}/done", ""

        def over() -> bool:
            nonlocal words
            if self.asked(lambda: self.store.add(done, 0)) >= self.size:
                return True
            words = stopped()
            return bool(words)

        self.asked(lambda: self.store.add(done, 1))
        silent = not self.pulse.lasts_until(over, silence_s)
        if self.rank != 0:
            self._tell_gone()
        elif not silent and not words:
            silent = not self._await_gone(silence_s)
            self.asked(lambda: self.store.delete_key(done))
        return f"a rank gave no sign of life for {silence_s:g} s" if silent else words

    def _tell_gone(self) -> None:
        # The last that is asked of the store, which sends no answer to it: rank 0 may go at once.
        self.asked(lambda: self.store.set(self._gone(self.rank), ""))

    def _await_gone(self, patience_s: float) -> bool:
        keys = [self._gone(rank) for rank in range(1, self.size)]
        went = self.pulse.lasts_until(
            lambda: bool(self.asked(lambda: self.store.check(keys))), patience_s
        )
        for key in keys:
            self.asked(lambda key=key: self.store.delete_key(key))
        return went

    def _gone(self, rank: int) -> str:
        return f"{self.root}/gone/{rank}"


class Asking:
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
            return within(1.25 * self._timeout_s + 0.5, step)
        except (TimeoutError, dist.DistError) as error:
            self.unanswered = words_of_store(error)
            raise RefitError(self.unanswered) from error

    def forget(self) -> None:
        """Something new is undertaken: ask again."""
        self.unanswered = ""


def words_of_store(error: Exception) -> str:
    """Why the store did not do what it was asked: its host has stopped, or has left."""
    what = "does not answer" if isinstance(error, TimeoutError) else "has left, or was ended"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"rank 0, where the ranks meet, {what} ({line}); look at its log"
