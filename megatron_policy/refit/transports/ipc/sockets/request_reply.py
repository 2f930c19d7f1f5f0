"""Both ends of a socket on this machine: the trainer sends requests, and one engine replies."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import tempfile
import time
from collections.abc import Callable

import zmq

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc.sockets.link import (
    RETRY_S,
    SCHEME,
    Link,
    describe_absence,
    describe_leaving,
    describe_silence,
    is_own_socket,
    parse_address,
)

_MOMENT_S = 0.001
_LEAVING_S = 0.5
"""Time for other peers that connected, but are not the engine, to leave."""
_MOMENT_TO_ANSWER_S = 1.0


class _SocketFile:
    """A socket file that only this user can connect to, until it is shut."""

    def __init__(self, path: str) -> None:
        """RefitError if it cannot be made."""
        self._path = path
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            # Made in a private directory, and moved once only this user can open it. A file of
            # another user is not replaced (the sticky bit of /tmp) but an error.
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
                f"the trainer cannot make the socket {path}: {error}. Remove the file there, or "
                "give the refit another address"
            ) from error

    def shut(self, until: float) -> None:
        """Accept no new connections. ZeroMQ still accepts those that are pending."""
        self.close()
        while select.select([self.listener], [], [], 0)[0] and time.monotonic() < until:
            time.sleep(_MOMENT_S)

    def close(self) -> None:
        """Remove the file, if it is still ours."""
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


class RequestSocket:
    """The trainer's end: all requests go to one engine."""

    def __init__(self, address: str, other: str, timeout_s: float) -> None:
        """Listen at the address, on a socket file that only this user can open; `other` names the
        peer in errors. RefitError if the socket cannot be made.
        """
        self.address, self._other, self._timeout_s = address, other, timeout_s
        self._context = zmq.Context()
        self._first: Callable[[], bytes] | None = None
        self._heard = False
        self._engine = -1  # the descriptor of its connection
        self._come_by = 0.0
        self._file: _SocketFile | None = None
        self._link: Link | None = None
        try:
            self._open()
        except BaseException:
            self._context.term()
            raise

    def send(self, question: Callable[[], bytes]) -> None:
        """Send the request that `question` returns; the previous one must have been answered.

        The first request waits for a peer, and is made and sent again if that peer leaves without
        replying. RefitError if no peer connects in time.
        """
        if not self._heard:
            self._first = question
            self._come_by = time.monotonic() + self._timeout_s
            self._send_first()
            return
        self._wait_for_others_to_leave()
        if not self._sent(question):
            raise RefitError(describe_leaving(self._other, self.address))

    def receive(self) -> bytes:
        """The reply; RefitError if none comes in time, or the other side disconnects."""
        end = time.monotonic() + self._timeout_s
        while True:
            if not self._ready(zmq.POLLIN, end):
                if self._heard:
                    raise RefitError(describe_leaving(self._other, self.address))
                # That peer belonged to another refit.
                self._reopen()
                self._send_first()
                end = time.monotonic() + self._timeout_s
            elif (answer := self._require_link().receive()) is not None:
                self._heard, self._first = True, None
                return answer

    def close(self) -> None:
        """Disconnect, and remove the file."""
        self._wait_for_first_answer()
        self._hang_up()
        self._context.term()

    def _send_first(self) -> None:
        """Send the first request to a peer, which may leave before it replies."""
        question = self._first
        assert question is not None, "nothing was asked"
        while not (self._alone() and self._sent(question)):
            self._reopen()

    def _alone(self) -> bool:
        """Whether exactly one engine connected; shuts the socket to others."""
        link, file = self._require_link(), self._file
        assert file is not None
        while time.monotonic() < self._come_by and not link.met:
            link.wait(self._come_by)
        if time.monotonic() >= self._come_by:
            raise RefitError(describe_absence(self._other, self.address, self._timeout_s))
        file.shut(self._come_by)
        link.wait(0.0)
        end = min(self._come_by, time.monotonic() + _LEAVING_S)
        while len(link.here) > 1 and time.monotonic() < end:
            link.wait(end)  # peers that are not engines leave by themselves
        if len(link.here) != 1:
            return False  # ZeroMQ would send to several in turn; they can try again
        (self._engine,) = link.here
        return True

    def _sent(self, question: Callable[[], bytes]) -> bool:
        """Send the request; whether the engine was still connected."""
        end = time.monotonic() + self._timeout_s
        while self._ready(zmq.POLLOUT, end):
            if self._require_link().send(question()):
                return True
        return False

    def _ready(self, what: int, end: float) -> bool:
        """Whether the socket gets ready before the engine disconnects; RefitError on a timeout."""
        link = self._require_link()
        while not link.wait(end if self._engine in link.here else 0.0, what):
            if self._engine not in link.here:
                return False
            if time.monotonic() >= end:
                raise RefitError(describe_silence(self._other, self.address, self._timeout_s))
        return True

    def _wait_for_first_answer(self) -> None:
        """Wait if this side gives up early: when the connection ends, ZeroMQ drops a request that
        the engine has not read, and the engine would wait for another trainer.
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
        """Open a new socket for engines."""
        path = parse_address(self.address)
        self._file = _SocketFile(path)
        self._link = Link(self._context, zmq.REQ)
        # ZeroMQ takes ownership of the descriptor and closes it.
        self._link.socket.setsockopt(zmq.USE_FD, os.dup(self._file.listener.fileno()))
        self._link.socket.bind(SCHEME + path)

    def _require_link(self) -> Link:
        assert self._link is not None, "it is closed"
        return self._link

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()
            file.listener.close()

    def _wait_for_others_to_leave(self) -> None:
        """Wait out peers that connected just before the shut: ZeroMQ would send to them in turn."""
        link, end = self._require_link(), time.monotonic() + self._timeout_s
        link.wait(0.0)
        while link.here - {self._engine}:
            if time.monotonic() >= end:
                raise RefitError(
                    f"more than one {self._other} connected to {self.address}. Give each its own "
                    "address"
                )
            link.wait(end)


LONGEST = 2**28  # bytes of a request: a peer that sends more is disconnected


class ReplySocket:
    """The engine's end: replies to the trainer at the address, and never to a second one."""

    def __init__(self, address: str, other: str, timeout_s: float) -> None:
        """`other` names the peer in errors; the first `receive` connects to it."""
        self.address, self._other, self._timeout_s = address, other, timeout_s
        self._path = parse_address(address)
        self._context = zmq.Context()
        self._link: Link | None = None
        self._heard = False

    def receive(self) -> bytes:
        """The next request; RefitError if none comes in time, or the other side disconnects. For
        the first, the socket may appear later, or be recreated meanwhile.

        RefitError also if the socket is another user's.
        """
        end = time.monotonic() + self._timeout_s
        while True:
            link = self._link or self._connect(end)
            if link.wait(0.0 if link.left else end, zmq.POLLIN):
                question = link.receive()
                if question is not None:
                    self._heard = True
                    return question
            elif link.left:
                if self._heard:
                    raise RefitError(describe_leaving(self._other, self.address))
                self._hang_up()
                time.sleep(RETRY_S * random.uniform(0.5, 1.5))  # not in step with another engine
            elif time.monotonic() >= end:
                words = describe_silence if self._heard else describe_absence
                raise RefitError(words(self._other, self.address, self._timeout_s))

    def send(self, answer: bytes) -> None:
        """Reply to the last request; if the other side is gone, the next `receive` raises."""
        assert self._link is not None, "it is closed, or nothing was received"
        self._link.send(answer)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; `linger_s` are the seconds to flush the last reply."""
        self._hang_up(linger_s)
        self._context.term()

    def _connect(self, end: float) -> Link:
        """A new link to the address, as soon as a socket is there."""
        while not is_own_socket(self._path):
            if time.monotonic() >= end:
                raise RefitError(describe_absence(self._other, self.address, self._timeout_s))
            time.sleep(RETRY_S)
        self._link = Link(self._context, zmq.REP)
        self._link.socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        self._link.socket.connect(self.address)
        return self._link

    def _hang_up(self, linger_s: float = 0.0) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(linger_s)
