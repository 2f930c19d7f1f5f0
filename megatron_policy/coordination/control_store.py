"""The control store of a refit group: values by key that the trainer and its engines exchange, and
that no process without the group's secret can read, set or delete. Every call is bounded in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_policy.coordination.authenticated_connection import WrongSecret, checked_secret
from megatron_policy.coordination.control_server import (
    ADD,
    DROP,
    GET,
    LAST,
    PUT,
    ControlClient,
    ControlServer,
    KeyValueStore,
    Reply,
    Request,
)
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.errors import RefitError

_RETRY_S = 0.05
_AGAIN_S = 1.0
"""How long to look for a host that has answered before."""
_GRACE_S = 0.5
"""How much longer than a process group's own timeout to wait for it: its message says more."""


class ControlStore:
    """Values by key, kept at (ip, port) by one process, the host, for holders of `secret`.

    Every method raises RefitError if the host does not answer; the next call connects again.
    """

    def __init__(
        self, ip: str, port: int, timeout_s: float, secret: str, host: bool = False
    ) -> None:
        """`timeout_s` bounds calls without a bound of their own. The host serves from here on, at a
        free port for 0, RefitError if it cannot; the others connect at their first call.
        """
        self._at, self._timeout_s = (ip, port), timeout_s
        self._secret = checked_secret(secret)
        self._values: KeyValueStore | None = KeyValueStore() if host else None
        self._client: ControlClient | None = None
        self._server: ControlServer | None = None
        if self._values is not None:
            try:
                self._server = ControlServer(ip, port, self._secret, self._values)
            except OSError as error:
                raise RefitError(
                    f"the refit group cannot be hosted at {ip}:{port}: {error.strerror}. Choose an "
                    "address of this machine that engines can reach, and a free port"
                ) from error

    @property
    def port(self) -> int:
        """The port at which it is kept."""
        return self._at[1] if self._server is None else self._server.port

    @property
    def connected(self) -> bool:
        """Whether the host has answered the last call."""
        return self._server is not None or self._client is not None

    def put(self, key: str, content: bytes, unless: str = "") -> None:
        """Set the value of a key, unless the other one exists."""
        self._perform(Request(PUT, (key,), content, unless=unless))

    def put_at_end(self, key: str, content: bytes) -> None:
        """Let the host set the value of a key that does not exist when this process leaves or is
        ended: when the connection breaks. It replaces what was to be set so; nothing is, if it is
        empty. Of the host, whose values end with it, nothing is set.
        """
        if self._values is None:
            self._perform(Request(LAST, (key,), content))

    def get(self, key: str, timeout_s: float, missing: str, unless: str = "") -> bytes:
        """The value of a key, once it exists; RefitError with `missing` if it does not in time, or
        with the value of the key `unless` once that exists; or if the host is lost meanwhile.
        """
        request = Request(GET, (key,), timeout_s=timeout_s, unless=unless)
        reply = self._perform(request, timeout_s)
        if not reply.found:
            raise RefitError(reply.body.decode(errors="replace") or missing)
        return reply.body

    def find(self, key: str) -> bytes | None:
        """The value of a key, None if it does not exist now."""
        reply = self._perform(Request(GET, (key,)))
        return reply.body if reply.found else None

    def drop(self, keys: Iterable[str]) -> None:
        """Delete keys, and those below them (key/...). For the host."""
        self._perform(Request(DROP, tuple(keys)))

    def count(self) -> int:
        """The number of keys, including those of process groups that met here. For the host."""
        assert self._values is not None, "only the host has the values"
        return len(self._values)

    def process_group(
        self, name: str, rank: int, size: int, timeout_s: float, unless: str = ""
    ) -> BoundedProcessGroup:
        """Meet the other `size - 1` processes under a name that is new to this store; RefitError if
        they do not come, or when the key `unless` exists.
        """
        # A connection of its own: a group may wait in it, and from a thread of torch's.
        own: KeyValueStore | ControlClient | None = self._values
        limit_s = _AGAIN_S if self.connected else timeout_s
        keeper = self._connect(limit_s) if own is None else own
        store = TorchControlStore(keeper, timeout_s, unless)

        def watch() -> None:
            # Not all that a group waits for is in the store.
            if unless and (words := self.find(unless)):
                raise RefitError(words.decode(errors="replace"))

        try:
            return run_with_timeout(
                timeout_s + _GRACE_S,
                lambda: BoundedProcessGroup(name, store, rank, size, timeout_s, keeper.close),
                watch,
            )
        except BaseException as error:
            keeper.close()
            if isinstance(error, TimeoutError):
                raise self._unreachable(error) from error
            raise

    def close(self) -> None:
        """Leave. The host's values are gone then."""
        self._disconnect()
        if self._server is not None:
            self._server.close()
        self._server = None

    def _perform(self, request: Request, connect_s: float | None = None) -> Reply:
        if self._values is not None:
            return self._values.perform(request)
        known = self._client
        try:
            limit_s = self._timeout_s if connect_s is None else connect_s
            self._client = client = known or self._connect(limit_s)
            return client.perform(request)
        except OSError as error:
            self._disconnect()
            # The host can have been restarted. What goes on in a handshake is over then, and what
            # was said in it is not to be said in one of the new host, which counts as the old one
            # has. One that is only silent would stay silent.
            begins = request.do == GET and connect_s is not None and not request.unless
            if known is not None and begins and not isinstance(error, TimeoutError):
                return self._perform(request, connect_s)
            raise self._unreachable(error) from error

    def _connect(self, timeout_s: float) -> ControlClient:
        """A connection to the host, whose port can open later than this call."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                left = max(_GRACE_S, end - time.monotonic())
                return ControlClient(*self._at, self._secret, left, self._timeout_s)
            except WrongSecret as error:
                ip, port = self._at
                raise RefitError(
                    f"the refit group at {ip}:{port} refuses this process: {error}. Give it the "
                    "trainer's: `Collective.secret`, or the driver's `get_refit_secret()`"
                ) from error
            except (OSError, RefitError) as error:
                if isinstance(error, RefitError) or time.monotonic() + _RETRY_S > end:
                    raise self._unreachable(error) from error
            time.sleep(_RETRY_S)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _unreachable(self, error: Exception) -> RefitError:
        ip, port = self._at
        return RefitError(
            f"training rank 0, at {ip}:{port}, cannot be reached: {error}. Is it running, and did "
            "it call init_collective with this address?"
        )


class TorchControlStore(dist.Store):
    """A control store with those of torch's methods that process groups call. DistStoreError if a
    key does not appear in time or the control store cannot be reached.

    torch calls it from threads of its own, and holds no reference that keeps it alive.
    """

    def __init__(
        self, keeper: KeyValueStore | ControlClient, timeout_s: float, unless: str
    ) -> None:
        """No key is waited for once there is the key `unless`."""
        super().__init__()
        self._keeper, self._timeout_s, self._unless = keeper, timeout_s, unless
        self._one_at_a_time = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._perform(Request(PUT, (key,), content))

    def get(self, key: str) -> bytes:
        return self._perform(self._waiting((key,), self._timeout_s)).body

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._perform(self._waiting(tuple(keys), limit))

    def check(self, keys: Sequence[str]) -> bool:
        return self._perform(Request(GET, tuple(keys)), missing=False).found

    def add(self, key: str, number: int) -> int:
        return int(self._perform(Request(ADD, (key,), b"%d" % number)).body)

    def delete_key(self, key: str) -> bool:
        return self._perform(Request(DROP, (key,)), missing=False).found

    def _waiting(self, keys: tuple[str, ...], timeout_s: float) -> Request:
        return Request(GET, keys, timeout_s=timeout_s, unless=self._unless)

    def _perform(self, request: Request, missing: bool = True) -> Reply:
        with self._one_at_a_time:
            try:
                reply = self._keeper.perform(request)
            except (OSError, RefitError) as error:
                raise dist.DistStoreError(f"the refit group's notes: {error}") from error
        if missing and not reply.found:
            raise dist.DistStoreError(
                reply.body.decode(errors="replace")
                or f"timeout: {', '.join(request.keys)} were not set within {request.timeout_s:g} s"
            )
        return reply
