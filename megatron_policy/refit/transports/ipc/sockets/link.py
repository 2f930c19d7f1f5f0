"""Addresses of sockets on this machine, and a ZeroMQ socket for one connection that tracks connects
and disconnects. Every wait is bounded.

By default ZeroMQ reconnects after a connection breaks: an engine that is slow to close its socket
would be mistaken for the engine of the next refit. Switched off (an interval of -1), libzmq 4.3.5
ends the process in an assertion, or spins, if the peer leaves while a message of several
parts is read. So it reconnects after a day.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_policy.errors import ConfigError, RefitError

SCHEME = "ipc://"
RETRY_S = 0.02
_ENDING_S = 1.0
_LONGEST = 107  # bytes of a path (unix(7))


def parse_address(address: str) -> str:
    """The socket file of an `ipc://` address; ConfigError for any other address."""
    path = str(address).removeprefix(SCHEME)
    if path == address or not os.path.isabs(path) or len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(
            f"{address!r} is not an address on this machine; write ipc:///tmp/<name>.sock, with a "
            f"path of at most {_LONGEST} bytes"
        )
    return path


def remove_if_dead(address: str) -> None:
    """Remove a socket file on which nobody listens any more because its owner was killed.

    An owner that is just shutting down gets a moment to finish.
    """
    path = parse_address(address)
    end = time.monotonic() + _ENDING_S
    with contextlib.suppress(FileNotFoundError, RefitError):
        while is_own_socket(path) and time.monotonic() < end:
            inode = os.lstat(path).st_ino
            if _is_refused(path) and os.lstat(path).st_ino == inode:
                os.unlink(path)
            time.sleep(RETRY_S)


def _is_refused(path: str) -> bool:
    """Whether nobody listens there. A trainer that does ignores short-lived connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def is_own_socket(path: str) -> bool:
    """Whether a socket is there; RefitError if it is another user's, or not a socket."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise RefitError(
            f"{path} is not a socket of this user, and weights are not taken from others. Run "
            "trainer and engine as one user, or remove it"
        )
    return True


_CAME = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_MET = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LEFT = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FAILED = zmq.EVENT_CLOSED  # an attempt to connect
_A_DAY_MS = 86_400_000


class Link:
    """A ZeroMQ socket that connects once, and the state of its connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _A_DAY_MS)
        self._events = self.socket.get_monitor_socket(_CAME | _MET | _LEFT | _FAILED)
        self.here: set[int] = set()  # descriptors of open connections
        self.met = False  # whether one has completed its handshake
        self.left = False  # whether one has broken or failed

    def wait(self, until: float, what: int = 0) -> bool:
        """Whether the socket is ready for `what`. Returns as soon as it is, when its connections
        change, or at `until` (monotonic clock).
        """
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        if what:
            poller.register(self.socket, what)
        poller.poll(int(max(0.0, until - time.monotonic()) * 1000))
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            kind, descriptor = event["event"], event["value"]
            if kind & _CAME:
                self.here.add(descriptor)
            elif kind & _MET:
                self.met = True
            else:
                self.here.discard(descriptor)
                self.left = True
        # After the events: a message sent before a connection broke still counts.
        return bool(what and self.socket.poll(0, what))

    def send(self, content: bytes) -> bool:
        """Send if a peer is connected; whether it was. Never waits: the peer may just be gone."""
        try:
            self.socket.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """A message, if one has arrived; never waits."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; `linger_s` are the seconds to flush the last message to a peer."""
        if linger_s:
            self.wait(0.0)
        self.socket.disable_monitor()
        self._events.close(0)
        self.socket.close(0 if self.left else int(linger_s * 1000))


def describe_leaving(other: str, address: str) -> str:
    """Error text: the other side disconnected."""
    return (
        f"the {other} at {address} disconnected in the middle of a refit. Check its log; the "
        "next refit starts from scratch"
    )


def describe_silence(other: str, address: str, timeout_s: float) -> str:
    """Error text: the other side is connected but silent."""
    return (
        f"the {other} at {address} was silent for {timeout_s:g} s. Check its log, or allow more "
        "time; the next refit starts from scratch"
    )


def describe_absence(other: str, address: str, timeout_s: float) -> str:
    """Error text: the other side never connected."""
    return (
        f"no {other} connected to {address} within {timeout_s:g} s. Start its side of the refit, "
        "with this address, on this machine"
    )
