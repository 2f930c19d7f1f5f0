"""Calls of the torch store in which the ranks of a policy meet, each bounded in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.errors import CheckpointError, RefitError

T = TypeVar("T")


class StoreCalls:
    """Calls the store. Once the store has not answered, every further call fails at once."""

    def __init__(
        self,
        timeout_s: float,
        error: type[CheckpointError | RefitError],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """No call takes longer than 1.25 * `timeout_s` seconds. `on_failure` is called before
        `error` is raised.
        """
        self._timeout_s, self._error, self._on_failure = timeout_s, error, on_failure
        self.failure = ""
        """Why the store did not answer; empty if it always has."""

    def __call__(self, step: Callable[[], T]) -> T:
        """The result of `step`, which calls the store. Rank 0 hosts the store and can be stopped or
        gone: that is the `error` of the constructor.
        """
        if self.failure:
            raise self._error(self.failure)
        try:
            # A process group's own timeout comes first: its message says more.
            return run_with_timeout(1.25 * self._timeout_s + 0.5, step)
        except (TimeoutError, dist.DistError) as error:
            self.failure = _describe(error)
            self._on_failure()
            raise self._error(self.failure) from error


def _describe(error: Exception) -> str:
    what = "does not answer" if isinstance(error, TimeoutError) else "has left, or was ended"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"the rendezvous on rank 0 {what} ({line}); check its log"
