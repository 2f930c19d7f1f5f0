"""Questions and answers over a socket file on this machine, every wait bounded, every file removed.

Knows nothing of what is said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time

import zmq

from megatron_policy.errors import ConfigError, RefitError

_SCHEME = "ipc://"
_RETRY_MS = 20
_ENDING_S = 1.0
_LONGEST = 107  # bytes of a path (unix(7))


class Line:
    """One end of a connection; `other` says in errors who is at the far end."""

    def __init__(self, kind: int, address: str, other: str, timeout_s: float) -> None:
        self.address, self._other, self._timeout_s = address, other, timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
        self._gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._talked = False
        self._inode: int | None = None

    def bind(self) -> None:
        """Wait at the address, in a file that is open to this user only."""
        path = path_of(self.address)
        try:
            # Made where nobody else can look, and moved when it is closed to them. What another
            # user has put there is not replaced (the sticky bit of /tmp) but an error.
            with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=".") as private:
                made = os.path.join(private, "s")
                self._socket.bind(_SCHEME + made)
                os.chmod(made, 0o600)
                self._inode = os.stat(made).st_ino
                os.rename(made, path)
        except (OSError, zmq.ZMQError) as error:
            raise RefitError(
                f"the trainer cannot make the socket {path}: {error}. Remove what stands there, or "
                "give the refit another address"
            ) from error

    def connect(self) -> None:
        """Join who waits at the address, now or later."""
        self._socket.connect(self.address)

    def send(self, content: bytes) -> None:
        """RefitError when nobody takes it in time."""
        self._wait(zmq.POLLOUT)
        self._socket.send(content)
        self._talked = True

    def receive(self) -> bytes:
        """RefitError when nothing comes in time, or the other side goes."""
        self._wait(zmq.POLLIN)
        self._talked = True
        return self._socket.recv()

    def close(self, linger_s: float = 0.0) -> None:
        """Hang up, and remove the file; the last answer has so many seconds to leave."""
        self._socket.disable_monitor()
        self._gone.close(0)
        self._socket.close(int(linger_s * 1000))
        self._context.term()
        path = path_of(self.address)
        with contextlib.suppress(FileNotFoundError):
            if self._inode is not None and os.lstat(path).st_ino == self._inode:
                os.unlink(path)

    def _wait(self, what: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, what)
        poller.register(self._gone, zmq.POLLIN)
        end = time.monotonic() + self._timeout_s
        while True:
            ready = dict(poller.poll(max(0.0, end - time.monotonic()) * 1000))
            if self._socket in ready:
                return
            if not ready:
                raise RefitError(self._silence())
            self._gone.recv_multipart()
            # Who left before anything was said is somebody that came and went.
            if self._talked and not self._socket.poll(0, what):
                raise RefitError(
                    f"the {self._other} at {self.address} has gone in the middle of a refit. Look "
                    "at its log; the next refit starts anew"
                )

    def _silence(self) -> str:
        if self._talked:
            return (
                f"the {self._other} at {self.address} was silent for {self._timeout_s:g} s. Look "
                "at its log, or allow more time; the next refit starts anew"
            )
        return _nobody(self._other, self.address, self._timeout_s)


def bound(address: str, other: str, timeout_s: float) -> Line:
    """The trainer's end, which asks. RefitError when there can be no socket at the address."""
    line = Line(zmq.REQ, address, other, timeout_s)
    try:
        line.bind()
    except BaseException:
        line.close()
        raise
    return line


def connected(address: str, other: str, timeout_s: float) -> Line:
    """The engine's end, which answers; made when a socket is there.

    RefitError when none comes in time, or when it is another user's.
    """
    path = path_of(address)
    end = time.monotonic() + timeout_s
    while not _is_own_socket(path):
        if time.monotonic() > end:
            raise RefitError(_nobody(other, address, timeout_s))
        time.sleep(_RETRY_MS / 1000)
    line = Line(zmq.REP, address, other, timeout_s)
    line.connect()
    return line


def path_of(address: str) -> str:
    """The file of an `ipc://` address; ConfigError for any other address."""
    path = address.removeprefix(_SCHEME)
    if path == address or not os.path.isabs(path) or len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(
            f"{address!r} is no address on this machine; write ipc:///tmp/<name>.sock, with a path "
            f"of at most {_LONGEST} bytes"
        )
    return path


def remove_if_dead(address: str) -> None:
    """Remove the file of a socket at which nobody waits any more, because its owner was killed.

    One that is just ending gets a moment for it.
    """
    path = path_of(address)
    end = time.monotonic() + _ENDING_S
    with contextlib.suppress(FileNotFoundError, RefitError):
        while _is_own_socket(path) and time.monotonic() < end:
            inode = os.lstat(path).st_ino
            if not _is_listed(path) and _is_refused(path) and os.lstat(path).st_ino == inode:
                os.unlink(path)
            time.sleep(_RETRY_MS / 1000)


def _is_listed(path: str) -> bool:
    """Whether somebody on this system waits there: asked without a connection, which the next
    trainer at this address would take for its engine that comes and goes.
    """
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8") as sockets:
        return any(line.rstrip("\n").endswith(f" {path}") for line in sockets)
    return False


def _is_refused(path: str) -> bool:
    """Whether nobody waits there, in a container of the same files either."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _is_own_socket(path: str) -> bool:
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


def _nobody(other: str, address: str, timeout_s: float) -> str:
    return (
        f"no {other} came to {address} within {timeout_s:g} s. Start its side of the refit, with "
        "this address, on this machine"
    )
