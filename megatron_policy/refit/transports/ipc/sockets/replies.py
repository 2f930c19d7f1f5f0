"""The engine's end of a socket on this machine: it replies to one trainer."""

from __future__ import annotations

import random
import time

import zmq

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc.sockets.address import RETRY_S, is_own_socket, path_of
from megatron_policy.refit.transports.ipc.sockets.link import Link, gone, nobody, silent

LONGEST = 2**28  # bytes of a request: a peer that sends more is disconnected


class ReplySocket:
    """The engine's end: replies to the trainer at the address, and never to a second one."""

    def __init__(self, address: str, other: str, timeout_s: float) -> None:
        """`other` names the peer in errors; the first `receive` connects to it."""
        self.address, self._other, self._timeout_s = address, other, timeout_s
        self._path = path_of(address)
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
            link = self._link or self._connected(end)
            if link.wait(0.0 if link.left else end, zmq.POLLIN):
                question = link.receive()
                if question is not None:
                    self._heard = True
                    return question
            elif link.left:
                if self._heard:
                    raise RefitError(gone(self._other, self.address))
                self._hang_up()
                time.sleep(RETRY_S * random.uniform(0.5, 1.5))  # not in step with another engine
            elif time.monotonic() >= end:
                words = silent if self._heard else nobody
                raise RefitError(words(self._other, self.address, self._timeout_s))

    def send(self, answer: bytes) -> None:
        """Reply to the last request; if the other side is gone, the next `receive` raises."""
        assert self._link is not None, "it is closed, or nothing was received"
        self._link.send(answer)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; `linger_s` are the seconds to flush the last reply."""
        self._hang_up(linger_s)
        self._context.term()

    def _connected(self, end: float) -> Link:
        """A new link to the address, as soon as a socket is there."""
        while not is_own_socket(self._path):
            if time.monotonic() >= end:
                raise RefitError(nobody(self._other, self.address, self._timeout_s))
            time.sleep(RETRY_S)
        self._link = Link(self._context, zmq.REP)
        self._link.socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        self._link.socket.connect(self.address)
        return self._link

    def _hang_up(self, linger_s: float = 0.0) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(linger_s)
