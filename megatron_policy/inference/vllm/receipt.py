"""A refit that arrives while its worker goes on computing: a thread of its own receives and checks
the weights, and the worker's own thread loads them, when its owner has paused vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.receive.assembler import KEEPS

RECEIVING, READY, OVER = "receiving", "ready", "over"

_here = threading.local()


class Receipt:
    """One refit that `receive`, called in a thread of its own, takes, and whose result is the
    `answer`. What it hands to `run_in_turn` waits for `switch`, and runs there.
    """

    def __init__(
        self,
        call: tuple[Any, ...],
        receive: Callable[[], dict[str, Any]],
        timeout_s: float,
        before: Receipt | None,
    ) -> None:
        """`call` says what is received, and by whom. It begins when `before` has ended, and waits
        at most so long to be let load.
        """
        self.call, self.state, self.step = call, RECEIVING, -1
        self.loads = False  # it was let
        self.answer: Future[dict[str, Any]] = Future()
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._given_up = ""
        self._work: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        where = device.current_device()
        threading.Thread(target=self._receive, args=(receive, before, where), daemon=True).start()

    def give_up(self, why: str) -> None:
        """Load nothing of it, unless it has begun to load."""
        with self._changed:
            self._given_up = self._given_up or why
            self._changed.notify()

    def take_over(self, call: tuple[Any, ...]) -> bool:
        """Whether the receipt that was given up is of the same call, and has not refused anything
        yet: then it is that of a new caller.
        """
        with self._changed:
            same = self.call == call and self.state == RECEIVING
            self._given_up = "" if same else self._given_up
            return same

    def switch(self) -> dict[str, Any]:
        """Let it load, in this thread, and return its answer."""
        with self._changed:
            if self.state == RECEIVING:
                self._given_up = "they were to be loaded before they had arrived"
            self.loads = self.state == READY and not self._given_up
            self._changed.notify()
        while (work := self._work.get()) is not None:
            act, done = work
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)
        self._work.put(None)  # for whoever asks again
        return self.answer.result()

    def wait_for_turn(self, step: int) -> None:
        """Wait until weights of that step, which have arrived, may be loaded; RefitError if they
        may not. For the receipt's own thread.
        """
        with self._changed:
            self.state, self.step = READY, step
            self._changed.wait_for(lambda: self.loads or self._given_up, self._timeout_s)
            if self.loads:
                return
            self._given_up = self._given_up or (
                f"vLLM's owner has not let them be loaded within {self._timeout_s:g} s"
            )
            raise RefitError(f"{self._given_up}. {KEEPS}")

    def run(self, act: Callable[[], object]) -> object:
        """Let `switch` call it, and return its result. For the receipt's own thread."""
        done: Future[object] = Future()
        self._work.put((act, done))
        return done.result()

    def _receive(
        self, receive: Callable[[], dict[str, Any]], before: Receipt | None, where: Any
    ) -> None:
        _here.receipt = self
        try:
            if before is not None:
                before.answer.result()
            device.use(where)
            self.answer.set_result(receive())
        except BaseException as error:
            self.answer.set_result({"refused": f"{type(error).__name__}: {error}"})
        finally:
            with self._changed:
                self.state = OVER
            self._work.put(None)


class Receipts:
    """The refits of one worker, one after another."""

    def __init__(self) -> None:
        self._last: Receipt | None = None

    def begin(
        self, call: tuple[Any, ...], receive: Callable[[], dict[str, Any]], timeout_s: float
    ) -> None:
        """Begin one, or go on with the last one if it was given up and is of the same call."""
        if self._last is None or not self._last.take_over(call):
            self.give_up("another refit has begun")
            self._last = Receipt(call, receive, timeout_s, self._last)

    @property
    def progress(self) -> dict[str, Any]:
        """The state of the last one, and the step that has arrived; or why it was refused."""
        receipt = self._begun
        if receipt.state != OVER:
            return {"value": (receipt.state, receipt.step)}
        answer = receipt.answer.result()
        return answer if "refused" in answer else {"value": (OVER, answer["value"][0])}

    def switch(self) -> dict[str, Any]:
        """Let the last one load."""
        return self._begun.switch()

    def give_up(self, why: str) -> None:
        """Load nothing of the last one, if that has not ended."""
        if self._last is not None:
            self._last.give_up(why)

    def check_ended(self) -> None:
        """RefitError if a thread still receives, other than this one."""
        if find_own() is None and self._last is not None and self._last.state != OVER:
            raise RefitError(
                "a refit that was begun has not ended: it does when the trainer's does, or after "
                "the timeout. Call again then"
            )

    @property
    def _begun(self) -> Receipt:
        assert self._last is not None, "refit_begin was called"
        return self._last


def make_pauses() -> Iterator[float]:
    """Seconds between questions how far a receipt is: each disturbs what vLLM computes a little."""
    seconds = 0.005
    while True:
        yield seconds
        seconds = min(2 * seconds, 0.1)


def find_own() -> Receipt | None:
    """The receipt whose thread this is."""
    receipt: Receipt | None = getattr(_here, "receipt", None)
    return receipt


def wait_for_turn(step: int) -> None:
    """Wait until weights of that step may be loaded: in a receipt's thread until it is let, at once
    in others.
    """
    if (receipt := find_own()) is not None:
        receipt.wait_for_turn(step)


def run_in_turn(act: Callable[[], object]) -> object:
    """The result of `act`, which a receipt's thread leaves to the worker's own."""
    receipt = find_own()
    return act() if receipt is None else receipt.run(act)
