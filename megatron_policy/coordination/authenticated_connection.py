"""A TCP connection between two holders of a secret, bounded in time and size. The handshake:

    host      24 bytes of greeting and version, 32 random bytes
    guest     32 random bytes, and HMAC-SHA256 of both under the secret
    host      1, and another HMAC of both under the secret; or 0, and zeros

Then frames follow. Each has an HMAC-SHA256 over its direction, number and content, under a key that
both sides derive from the secret and the random bytes. The secret is never sent. The content is not
encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time

from megatron_policy.errors import ConfigError, RefitError

_GREETING = b"megatron-policy refit 2\n"
_NONCE = _MAC = 32
_LENGTHS = struct.Struct("!IQ")
_HEADER_BYTES, _BODY_BYTES = 2**24, 2**32
_AT_ONCE = 2**20
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
    """One end of the connection. OSError, which TimeoutError is, if it breaks."""

    def __init__(self, connection: socket.socket, key: bytes, host: bool) -> None:
        """Made by `accept` and `connect`, after the handshake."""
        connection.settimeout(None)
        self._connection, self._key = connection, key
        self._out, self._in = (b"host", b"guest") if host else (b"guest", b"host")
        self._sent = self._received = 0

    def send(self, header: bytes, body: bytes, timeout_s: float) -> None:
        """Send one frame."""
        lengths = _LENGTHS.pack(len(header), len(body))
        self._connection.settimeout(timeout_s)
        mac = self._mac(self._out, self._sent, lengths, header, body)
        self._sent += 1
        self._connection.sendall(lengths + header)
        self._connection.sendall(body)
        self._connection.sendall(mac)

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes]:
        """Header and body of the next frame. None: wait as long as the connection lasts."""
        lengths = _read(self._connection, _LENGTHS.size, timeout_s)
        header_bytes, body_bytes = _LENGTHS.unpack(lengths)
        if header_bytes > _HEADER_BYTES or body_bytes > _BODY_BYTES:
            raise ConnectionAbortedError(
                f"received a message of {header_bytes} + {body_bytes} bytes, over the limit of "
                f"{_HEADER_BYTES} + {_BODY_BYTES}"
            )
        header = _read(self._connection, header_bytes, timeout_s)
        body = _read(self._connection, body_bytes, timeout_s)
        mac = self._mac(self._in, self._received, lengths, header, body)
        self._received += 1
        if not hmac.compare_digest(mac, _read(self._connection, _MAC, timeout_s)):
            raise ConnectionAbortedError("a message was changed on its way")
        return header, body

    def close(self) -> None:
        """Close it, even while a thread of this process waits in it."""
        hang_up(self._connection)

    def _mac(self, direction: bytes, number: int, *content: bytes) -> bytes:
        made = hmac.new(self._key, direction + struct.pack("!Q", number), "sha256")
        for part in content:
            made.update(part)
        return made.digest()


def accept(connection: socket.socket, secret: bytes, timeout_s: float) -> AuthenticatedConnection:
    """The host's handshake; WrongSecret if the guest does not have the secret."""
    end = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + own)
    said = _read(connection, _NONCE + _MAC, end - time.monotonic())
    both = own + said[:_NONCE]
    if not hmac.compare_digest(_proof(secret, b"guest", both), said[_NONCE:]):
        connection.sendall(bytes(1 + _MAC))
        raise WrongSecret("a process without the secret of the refit group was refused")
    connection.sendall(b"\1" + _proof(secret, b"host", both))
    return AuthenticatedConnection(connection, _proof(secret, b"frames", both), host=True)


def connect(connection: socket.socket, secret: bytes, timeout_s: float) -> AuthenticatedConnection:
    """The guest's handshake; WrongSecret if the host has another secret, RefitError if it is not
    a host of this kind.
    """
    end = time.monotonic() + timeout_s
    greeting = _read(connection, len(_GREETING), timeout_s)
    if greeting != _GREETING:
        raise RefitError(
            "the process listening there is not a refit group of this version of megatron-policy"
        )
    both = _read(connection, _NONCE, end - time.monotonic()) + secrets.token_bytes(_NONCE)
    connection.sendall(both[_NONCE:] + _proof(secret, b"guest", both))
    said = _read(connection, 1 + _MAC, end - time.monotonic())
    if not hmac.compare_digest(b"\1" + _proof(secret, b"host", both), said):
        raise WrongSecret("its secret is a different one")
    return AuthenticatedConnection(connection, _proof(secret, b"frames", both), host=False)


def hang_up(connection: socket.socket) -> None:
    """Close a socket, even while threads of this process use it."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _proof(secret: bytes, purpose: bytes, both: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + purpose + both, "sha256")


def _read(connection: socket.socket, size: int, timeout_s: float | None) -> bytes:
    """So many bytes. Memory grows as they arrive."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    content = bytearray()
    while len(content) < size:
        connection.settimeout(None if end is None else max(0.001, end - time.monotonic()))
        piece = connection.recv(min(size - len(content), _AT_ONCE))
        if not piece:
            raise ConnectionResetError("the other side hung up")
        content += piece
    return bytes(content)
