"""Values by key, in one process, and a server of them at one address for holders of a secret."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from dataclasses import dataclass, replace

from megatron_policy.coordination.authenticated_connection import (
    AuthenticatedConnection,
    close_in_children,
    hang_up,
)
from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import RefitError

PUT, GET, ADD, DROP, LAST = "put", "get", "add", "drop", "last"
LONGEST_S = 1e6
_HANDSHAKE_S = 10.0
_AT_ONCE = 64  # connections that have not authenticated: beyond that the oldest is closed
_SENDING_S = 120.0
_PAUSE_S = 0.05
_DIGITS = 20  # of a number; int() refuses more than 4,300
_GRACE_S = 1.0  # for the answer that a key has not appeared in time


@dataclass(frozen=True)
class Request:
    """One of these requests, of `keys`:

    put     set the value of the first to `body`, unless the key `unless` exists
    get     the value of the first, once all exist; that takes `timeout_s` seconds at most, and ends
            when the key `unless` exists, whose value it then is
    add     `body` to the first; both are numbers of at most 20 digits, and what does not exist
            is 0
    drop    delete all of them, and those below them (key/...)
    last    put it when this connection ends, unless the key exists then, in place of what was said
            before; nothing, if `body` is empty
    """

    do: str
    keys: tuple[str, ...]
    body: bytes = b""
    timeout_s: float = 0.0
    unless: str = ""

    def header(self) -> bytes:
        """All but the body, as JSON."""
        content = {"do": self.do, "keys": self.keys, "timeout_s": self.timeout_s}
        return json.dumps(content | {"unless": self.unless}).encode()

    @classmethod
    def parse(cls, header: bytes, body: bytes) -> Request:
        """The inverse of `header`; RefitError for anything else."""
        match _parse(header):
            case {
                "do": "put" | "get" | "add" | "drop" | "last" as do,
                "keys": [str(), *_] as keys,
                "timeout_s": int() | float() as timeout_s,
                "unless": str() as unless,
            } if all(isinstance(key, str) for key in keys) and 0 <= timeout_s <= LONGEST_S:
                return cls(do, tuple(keys), body, float(timeout_s), unless)
        raise RefitError(f"the refit group received an unrecognised request: {header[:80]!a}")


@dataclass(frozen=True)
class Reply:
    """Whether all keys existed (of `drop`: whether any did), and a value or a sum; or in `error`
    why the request was not understood.
    """

    found: bool = True
    body: bytes = b""
    error: str = ""

    def header(self) -> bytes:
        """All but the body, as JSON."""
        return json.dumps({"found": self.found, "error": self.error}).encode()

    @classmethod
    def parse(cls, header: bytes, body: bytes) -> Reply:
        """The inverse of `header`; RefitError for anything else, and for an error in it."""
        match _parse(header):
            case {"found": bool(found), "error": str(error)}:
                if error:
                    raise RefitError(error)
                return cls(found, body)
        raise RefitError(f"the refit group sent an unrecognised answer: {header[:80]!a}")


def _parse(header: bytes) -> object:
    try:
        return json.loads(header)
    except (ValueError, RecursionError):
        return None


class KeyValueStore:
    """The values. Safe to use from any number of threads."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._contents)

    def perform(self, request: Request) -> Reply:
        """Serve the request; RefitError for a sum of what is not a number."""
        found, first, keys, contents = True, request.keys[0], request.keys, self._contents
        off = request.unless
        with self._changed:
            body = b""
            match request.do:
                case "get":
                    self._changed.wait_for(
                        lambda: all(key in contents for key in keys) or off in contents,
                        request.timeout_s,
                    )
                    there = all(key in contents for key in keys)
                    return Reply(there, contents[first] if there else contents.get(off, b""))
                case "put" if off not in contents:
                    contents[first] = request.body
                case "add":
                    numbers = contents.get(first, b"0"), request.body
                    for each in numbers:
                        digits = each.removeprefix(b"-")
                        if not digits.isdigit() or len(digits) > _DIGITS:
                            raise RefitError(
                                f"the note {first} of the refit group is not a number of at most "
                                f"{_DIGITS} digits: {each[:80]!a}"
                            )
                    body = contents[first] = b"%d" % sum(map(int, numbers))
                case "drop":
                    below = tuple(f"{key}/" for key in keys)
                    gone = [key for key in contents if key in keys or key.startswith(below)]
                    found = len([contents.pop(key) for key in gone]) > 0
            self._changed.notify_all()
            return Reply(found, body)

    def close(self) -> None:
        """Do nothing: other threads go on with it."""


class ControlServer:
    """Serves values until `close`, each connection in a thread."""

    def __init__(self, ip: str, port: int, secret: bytes, values: KeyValueStore) -> None:
        """Listen at (ip, port) and nowhere else; at a free port for 0. OSError where that is
        impossible.
        """
        self._secret, self._values = secret, values
        family, _, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family)
        close_in_children(self._listener)
        self._guests: dict[socket.socket, bool] = {}  # whether each has authenticated
        self._lock = threading.Lock()
        self._closed = False
        accepting = threading.Thread(target=self._accept, daemon=True, name="control-store")
        if not start_thread(accepting):
            self._listener.close()
            raise OSError(errno.EAGAIN, "no thread can be started")

    @property
    def port(self) -> int:
        """The port at which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening and close all connections."""
        with self._lock:
            self._closed = True
            guests = list(self._guests)
        for end in (self._listener, *guests):
            hang_up(end)

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, _ = self._listener.accept()
            except OSError:
                time.sleep(_PAUSE_S)  # the client has left again, or no descriptors are free
                continue
            with self._lock:
                self._guests[end] = False
                strangers = [each for each, known in self._guests.items() if not known]
            for oldest in strangers[:-_AT_ONCE]:
                hang_up(oldest)  # its thread forgets it
            thread = threading.Thread(
                target=self._serve, args=(end,), daemon=True, name="control-store"
            )
            if not start_thread(thread):
                self._forget(end)

    def _serve(self, end: socket.socket) -> None:
        # Only this connection breaks; the process at its other end notices that.
        last: Request | None = None
        try:
            with contextlib.suppress(OSError, RefitError):
                guest = AuthenticatedConnection(
                    end, self._secret, host=True, timeout_s=_HANDSHAKE_S
                )
                with self._lock:
                    self._guests[end] = True
                while not self._closed:
                    message = guest.receive()
                    try:
                        request = Request.parse(*message)
                        if request.do == LAST:
                            last, reply = replace(request, do=PUT, unless=request.keys[0]), Reply()
                        else:
                            reply = self._values.perform(request)
                    except RefitError as error:
                        reply = Reply(error=str(error))
                    with guest.limit_time(_SENDING_S):
                        guest.send(reply.header(), reply.body)
        finally:
            if last is not None and last.body:
                self._values.perform(last)
            self._forget(end)

    def _forget(self, end: socket.socket) -> None:
        with self._lock:
            del self._guests[end]
        hang_up(end)


class ControlClient:
    """Sends requests to a ControlServer; for one thread at a time."""

    def __init__(
        self, ip: str, port: int, secret: bytes, connect_s: float, timeout_s: float
    ) -> None:
        """Connect within `connect_s`; `timeout_s` bounds requests that have no bound of their own.
        OSError where nobody listens there; see `AuthenticatedConnection` for the rest.
        """
        end = socket.create_connection((ip, port), connect_s)
        try:
            self._host = AuthenticatedConnection(end, secret, host=False, timeout_s=connect_s)
        except BaseException:
            hang_up(end)
            raise
        self._timeout_s = timeout_s

    def perform(self, request: Request) -> Reply:
        """As `KeyValueStore.perform`, in limited time; OSError if the server does not answer."""
        with self._host.limit_time(
            request.timeout_s + _GRACE_S if request.timeout_s else self._timeout_s
        ):
            self._host.send(request.header(), request.body)
            return Reply.parse(*self._host.receive())

    def close(self) -> None:
        """Hang up."""
        self._host.close()
