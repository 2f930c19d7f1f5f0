"""A TCP connection between two holders of a secret, bounded in time and size. The handshake:

    host      24 bytes of greeting and version
    both      32 random bytes, from which both derive a key under the secret
    guest     an empty message
    host      an empty message; or one that is not sealed, if the guest's was not

Messages have the framing of `multiprocessing.connection`: a header, a body and their seal, which is
an HMAC-SHA256 of direction, number and content under the key. The secret is never sent. The content
is not encrypted.

That module's own challenge is left out. It says who opened a connection, not who sent a message, so
a sealed message would still have to follow; and on Python 3.11 it is an HMAC-MD5.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import ConfigError, RefitError

_GREETING = b"megatron-policy refit 4\n"
_NONCE = _SEAL = 32
_HEADER_BYTES, _BODY_BYTES = 2**24, 2**32
SECRET_CHARACTERS = 16


def new_secret() -> str:
    """64 random hexadecimal digits."""
    return secrets.token_hex(32)


def checked_secret(secret: str) -> bytes:
    """The secret as bytes; ConfigError if it is too short to be safe."""
    if not isinstance(secret, str) or len(secret) < SECRET_CHARACTERS:
        raise ConfigError(
            f"the secret of a refit group is a string of {SECRET_CHARACTERS} characters or more, "
            "such as secrets.token_hex(32)"
        )
    return secret.encode()


class WrongSecret(RefitError):
    """The other side has another secret or none."""


class AuthenticatedConnection:
    """One end of the connection, for one thread at a time. OSError if it breaks."""

    def __init__(self, end: socket.socket, secret: bytes, *, host: bool, timeout_s: float) -> None:
        """Shake hands over `end` within `timeout_s` seconds. WrongSecret if the other side does not
        have the secret; RefitError from a guest whose host is not of this kind, and as
        `limit_time`.
        """
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._host = end, host
        # A descriptor of its own: `end` can be closed while a thread waits in the connection.
        self._connection = Connection(os.dup(end.fileno()))
        close_in_children(end, self._connection)
        self._sent = self._received = 0
        self._most = (0, 0)
        with self.limit_time(timeout_s):
            if host:
                end.sendall(_GREETING)
            else:
                self._check_greeting()
            own = secrets.token_bytes(_NONCE)
            self._connection.send_bytes(own)
            other = self._read(_NONCE)
            both = own + other if host else other + own
            self._key = hmac.digest(secret, _GREETING + both, "sha256")
            try:
                if host:
                    self.receive()
                self.send(b"", b"")
                if not host:
                    self.receive()
            except ConnectionAbortedError as error:
                if not host:
                    raise WrongSecret("its secret is a different one") from error
                for _ in range(3):
                    self._connection.send_bytes(b"")
                words = "a process without the secret of the refit group was refused"
                raise WrongSecret(words) from error
        self._most = (_HEADER_BYTES, _BODY_BYTES)

    @contextlib.contextmanager
    def limit_time(self, timeout_s: float) -> Iterator[None]:
        """Close the connection if the body takes more than `timeout_s` seconds: what it waits for
        raises TimeoutError. RefitError, before the body, if no thread can be started to watch it.
        """
        late = threading.Event()

        def end() -> None:
            late.set()
            self.close()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        if not start_thread(timer):
            # No OSError, after which a client would connect again until its time is up.
            raise RefitError("no thread can be started to watch a connection of the refit group")
        try:
            yield
        except OSError as error:
            if late.is_set():
                raise TimeoutError("timed out") from error
            raise
        finally:
            timer.cancel()

    def send(self, header: bytes, body: bytes) -> None:
        """Send one message."""
        seal = self._seal(self._host, self._sent, header, body)
        self._sent += 1
        for part in (header, body, seal):
            self._connection.send_bytes(part)

    def receive(self) -> tuple[bytes, bytes]:
        """Header and body of the next message."""
        header, body, seal = (self._read(most) for most in (*self._most, _SEAL))
        expected = self._seal(not self._host, self._received, header, body)
        self._received += 1
        if not hmac.compare_digest(seal, expected):
            raise ConnectionAbortedError("a message was changed on its way")
        return header, body

    def close(self) -> None:
        """Close it, even while a thread of this process waits in it."""
        hang_up(self._end)

    def _check_greeting(self) -> None:
        greeting = b""
        while missing := len(_GREETING) - len(greeting):
            part = self._end.recv(missing)
            if not part:
                raise ConnectionResetError("the other side hung up")
            greeting += part
        if greeting != _GREETING:
            raise RefitError(
                "the process listening there is not a refit group of this version of "
                "megatron-policy"
            )

    def _read(self, most: int) -> bytes:
        try:
            return self._connection.recv_bytes(most)
        except EOFError:
            raise ConnectionResetError("the other side hung up") from None

    def _seal(self, by_host: bool, number: int, header: bytes, body: bytes) -> bytes:
        start = struct.pack("!?QQQ", by_host, number, len(header), len(body))
        made = hmac.new(self._key, start + header, "sha256")
        made.update(body)
        return made.digest()


def close_in_children(*ends: socket.socket | Connection) -> None:
    """Let processes that this one forks have none of these: a connection breaks with the process
    that made it, whatever its children do.
    """
    _ends.update(ends)


def _close_all() -> None:
    for end in list(_ends):
        with contextlib.suppress(OSError):  # it is closed already
            end.close()


_ends: weakref.WeakSet[socket.socket | Connection] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all)


def hang_up(connection: socket.socket) -> None:
    """Close a socket, even while threads of this process use it."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
