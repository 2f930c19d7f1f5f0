"""Addresses on this machine and the socket files behind them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time

from megatron_policy.errors import ConfigError, RefitError

SCHEME = "ipc://"
RETRY_S = 0.02
_ENDING_S = 1.0
_LONGEST = 107  # bytes of a path (unix(7))


def path_of(address: str) -> str:
    """The socket file of an `ipc://` address; ConfigError for any other address."""
    path = address.removeprefix(SCHEME)
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
    path = path_of(address)
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
