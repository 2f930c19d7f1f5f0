"""The trainer's end of a socket on this machine: it asks, one engine answers. Knows nothing of what
is said.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable

import zmq

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc.address import SCHEME, path_of
from megatron_policy.refit.transports.ipc.link import Link, gone, nobody, silent

_MOMENT_S = 0.001
_LEAVING_S = 0.5
"""For those who came, beside an engine, without being one."""
_MOMENT_TO_ANSWER_S = 1.0


class _Door:
    """A socket file that is open to this user only, until it is shut."""

    def __init__(self, path: str) -> None:
        """RefitError when there can be none."""
        self._path = path
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            # Made where nobody else can look, and moved when it is closed to them. What another
            # user has put there is not replaced (the sticky bit of /tmp) but an error.
            with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=".") as private:
                made = os.path.join(private, "s")
                self.listener.bind(made)
                os.chmod(made, 0o600)
                self.listener.setblocking(False)
                self.listener.listen()
                self._inode = os.stat(made).st_ino
                os.rename(made, path)
        except OSError as error:
            self.listener.close()
            raise RefitError(
                f"the trainer cannot make the socket {path}: {error}. Remove what stands there, or "
                "give the refit another address"
            ) from error

    def shut(self, until: float) -> None:
        """Let nobody come any more. Who came before is let in by the library meanwhile."""
        self.close()
        while select.select([self.listener], [], [], 0)[0] and time.monotonic() < until:
            time.sleep(_MOMENT_S)

    def close(self) -> None:
        """Remove the file, if it is still this one's."""
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


class RequestSocket:
    """The trainer's end: one engine is asked all questions."""

    def __init__(self, address: str, other: str, timeout_s: float) -> None:
        """Wait at the address, in a file that is open to this user only; `other` says in errors
        who is to come. RefitError when there can be no socket.
        """
        self.address, self._other, self._timeout_s = address, other, timeout_s
        self._context = zmq.Context()
        self._first: Callable[[], bytes] | None = None
        self._heard = False
        self._engine = -1  # the descriptor of its connection
        self._come_by = 0.0
        self._door: _Door | None = None
        self._link: Link | None = None
        try:
            self._open()
        except BaseException:
            self._context.term()
            raise

    def ask(self, question: Callable[[], bytes]) -> None:
        """Send what `question` returns; the one before was answered.

        The first question waits for somebody who takes it, and is made and sent again where that
        one leaves without an answer. RefitError when nobody comes in time.
        """
        if not self._heard:
            self._first = question
            self._come_by = time.monotonic() + self._timeout_s
            self._ask_first()
            return
        self._wait_for_others_to_leave()
        if not self._sent(question):
            raise RefitError(gone(self._other, self.address))

    def hear(self) -> bytes:
        """The answer; RefitError when none comes in time, or the other side goes."""
        end = time.monotonic() + self._timeout_s
        while True:
            if not self._ready(zmq.POLLIN, end):
                if self._heard:
                    raise RefitError(gone(self._other, self.address))
                # It came for another refit, and had nothing to do with this one.
                self._reopen()
                self._ask_first()
                end = time.monotonic() + self._timeout_s
            elif (answer := self._linked().receive()) is not None:
                self._heard, self._first = True, None
                return answer

    def close(self) -> None:
        """Hang up, and remove the file."""
        self._wait_for_first_answer()
        self._hang_up()
        self._context.term()

    def _ask_first(self) -> None:
        """Ask somebody, who may leave before the answer."""
        question = self._first
        assert question is not None, "nothing was asked"
        while not (self._alone() and self._sent(question)):
            self._reopen()

    def _alone(self) -> bool:
        """Whether one engine came, after which nobody else can."""
        link, door = self._linked(), self._door
        assert door is not None
        while time.monotonic() < self._come_by and not link.met:
            link.wait(self._come_by)
        if time.monotonic() >= self._come_by:
            raise RefitError(nobody(self._other, self.address, self._timeout_s))
        door.shut(self._come_by)
        link.wait(0.0)
        end = min(self._come_by, time.monotonic() + _LEAVING_S)
        while len(link.here) > 1 and time.monotonic() < end:
            link.wait(end)  # who came and said nothing leaves by itself
        if len(link.here) != 1:
            return False  # ZeroMQ would ask several in turn; they may try again
        (self._engine,) = link.here
        return True

    def _sent(self, question: Callable[[], bytes]) -> bool:
        """Whether the engine was still there to be sent it."""
        end = time.monotonic() + self._timeout_s
        while self._ready(zmq.POLLOUT, end):
            if self._linked().send(question()):
                return True
        return False

    def _ready(self, what: int, end: float) -> bool:
        """Whether the socket is, before the engine has gone; RefitError when it is too late."""
        link = self._linked()
        while not link.wait(end if self._engine in link.here else 0.0, what):
            if self._engine not in link.here:
                return False
            if time.monotonic() >= end:
                raise RefitError(silent(self._other, self.address, self._timeout_s))
        return True

    def _wait_for_first_answer(self) -> None:
        """Where this side gives up early: ZeroMQ drops a question that the engine has not read when
        the connection ends, and the engine would wait for another trainer.
        """
        link, end = self._link, time.monotonic() + _MOMENT_TO_ANSWER_S
        if link is None or self._heard:
            return
        while self._engine in link.here and time.monotonic() < end:
            if link.wait(end, zmq.POLLIN):
                return

    def _reopen(self) -> None:
        self._hang_up()
        self._open()

    def _open(self) -> None:
        """Let engines come to a new socket."""
        path = path_of(self.address)
        self._door = _Door(path)
        self._link = Link(self._context, zmq.REQ)
        # The library takes the descriptor, and gives it back to the system.
        self._link.socket.setsockopt(zmq.USE_FD, os.dup(self._door.listener.fileno()))
        self._link.socket.bind(SCHEME + path)

    def _linked(self) -> Link:
        assert self._link is not None, "it is closed"
        return self._link

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        door, self._door = self._door, None
        if door is not None:
            door.close()
            door.listener.close()

    def _wait_for_others_to_leave(self) -> None:
        """Who came in the last moment before the door was shut would be asked in turn."""
        link, end = self._linked(), time.monotonic() + self._timeout_s
        link.wait(0.0)
        while link.here - {self._engine}:
            if time.monotonic() >= end:
                raise RefitError(
                    f"more than one {self._other} came to {self.address}. Give each an address of "
                    "its own"
                )
            link.wait(end)
