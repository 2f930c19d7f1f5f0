"""Calls of vLLM that a refit waits for so long, and of which one that is late keeps later ones
back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import RefitError

_T = TypeVar("_T")


class LateAnswer(RefitError):
    """vLLM has not answered in time."""


class EngineCalls:
    """The calls of one vLLM, each in a thread. While one that was given up has not returned, no
    other is begun: vLLM may be in the midst of it, and take the one for a part of the other.
    """

    def __init__(self) -> None:
        self._late: tuple[str, Future[Any]] | None = None

    def begin(self, step: Callable[[], _T]) -> Future[_T]:
        """Begin a call; LateAnswer while an earlier one is under way that was given up."""
        if self._late is not None and not self._late[1].done():
            raise LateAnswer(
                f"vLLM has still not returned from an earlier call to {self._late[0]}, and takes "
                "no weights until it has: restart the engine, and make the transport anew"
            )
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(step())
            except Exception as error:
                outcome.set_exception(error)

        if not start_thread(threading.Thread(target=run, daemon=True, name="vllm-call")):
            run()
        return outcome

    def wait(self, call: Future[_T], what: str, timeout_s: float) -> _T:
        """What the call returns. RefitError if it fails; LateAnswer if it takes longer than
        `timeout_s` seconds: it is then given up.
        """
        try:
            return call.result(timeout_s)
        except TimeoutError as error:
            if call.done():  # it is the client's own
                raise RefitError(f"vLLM could not {what}: {error}") from error
            self._late = (what, call)
            raise LateAnswer(
                f"vLLM did not {what} within {timeout_s:g} s: is it running, and is it idle? If it "
                "never returns from that, restart the engine, and make the transport anew"
            ) from error
        except Exception as error:
            raise RefitError(f"vLLM could not {what}: {error}") from error

    def run(self, what: str, step: Callable[[], _T], timeout_s: float) -> _T:
        """Begin a call and wait for it."""
        return self.wait(self.begin(step), what, timeout_s)
