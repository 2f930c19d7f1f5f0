"""Serves a key-value store at one address, to holders of the secret only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from megatron_policy.coordination.authenticated_connection import (
    AuthenticatedConnection,
    accept,
    connect,
    hang_up,
)
from megatron_policy.coordination.key_value import KeyValueStore, Reply, Request
from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import RefitError

_HANDSHAKE_S = 10.0
_AT_ONCE = 64  # connections that have not authenticated: beyond that the oldest is closed
_SENDING_S = 120.0
_PAUSE_S = 0.05
_GRACE_S = 1.0  # for the answer that a key has not appeared in time


class ControlServer:
    """Serves until `close`, each connection in a thread."""

    def __init__(self, ip: str, port: int, secret: bytes, values: KeyValueStore) -> None:
        """Listen at (ip, port) and nowhere else. OSError where that is impossible."""
        self._secret, self._values = secret, values
        family, _, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family)
        self._connections: set[socket.socket] = set()
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closed = False
        start_thread(threading.Thread(target=self._accept, daemon=True, name="control-store"))

    def close(self) -> None:
        """Stop listening and close all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            hang_up(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_S)  # the client has left again, or no descriptors are free
                continue
            self._admit(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), daemon=True, name="control-store"
            )
            if not start_thread(thread):
                self._forget(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection that has not authenticated; close the oldest such one if there are too
        many. Its thread forgets it.
        """
        with self._lock:
            self._connections.add(connection)
            self._unauthenticated[connection] = None
            oldest = (
                next(iter(self._unauthenticated)) if len(self._unauthenticated) > _AT_ONCE else None
            )
            if oldest is not None:
                del self._unauthenticated[oldest]
        if oldest is not None:
            hang_up(oldest)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._unauthenticated.pop(connection, None)
        hang_up(connection)

    def _serve(self, connection: socket.socket) -> None:
        # Only this connection breaks; the process at its other end notices that.
        try:
            with contextlib.suppress(OSError, RefitError):
                if self._closed:
                    return
                guest = accept(connection, self._secret, _HANDSHAKE_S)
                with self._lock:
                    self._unauthenticated.pop(connection, None)
                while True:
                    reply = self._reply(*guest.receive(None))
                    guest.send(reply.header(), reply.body, _SENDING_S)
        finally:
            self._forget(connection)

    def _reply(self, header: bytes, body: bytes) -> Reply:
        try:
            return self._values.perform(Request.decoded(header, body))
        except RefitError as error:
            return Reply(error=str(error))


class ControlClient:
    """Sends requests to a ControlServer; for one thread at a time."""

    def __init__(
        self, ip: str, port: int, secret: bytes, connect_s: float, timeout_s: float
    ) -> None:
        """Connect within `connect_s`; `timeout_s` bounds requests that have no bound of their own.
        OSError where nobody listens there; see `authenticated_connection.connect` for the rest.
        """
        connection = socket.create_connection((ip, port), connect_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._host: AuthenticatedConnection = connect(connection, secret, connect_s)
        except BaseException:
            hang_up(connection)
            raise
        self._timeout_s = timeout_s

    def perform(self, request: Request) -> Reply:
        """As `KeyValueStore.perform`; OSError if the server does not answer."""
        self._host.send(request.header(), request.body, self._timeout_s)
        limit = request.timeout_s + _GRACE_S if request.timeout_s else self._timeout_s
        return Reply.decoded(*self._host.receive(limit))

    def close(self) -> None:
        """Hang up."""
        self._host.close()
