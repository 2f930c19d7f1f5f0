"""The control store of a refit group: values by key that the trainer and its engines exchange, and
that no process without the group's secret can read, set or delete. Every call is bounded in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_policy.coordination.authenticated_connection import WrongSecret, checked_secret
from megatron_policy.coordination.control_server import ControlClient, ControlServer
from megatron_policy.coordination.key_value import (
    COUNT,
    DROP,
    GET,
    PUT,
    KeyValue,
    KeyValueStore,
    Request,
)
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.coordination.torch_store import TorchControlStore
from megatron_policy.errors import RefitError

T = TypeVar("T")

_RETRY_S = 0.05
_GRACE_S = 0.5
"""How much longer than a process group's own timeout to wait for it: its message says more."""


class ControlStore:
    """Values by key, kept at (ip, port) by one process, the host, for holders of `secret`.

    Every method raises RefitError if the host does not answer; the next call connects again.
    """

    def __init__(
        self, ip: str, port: int, timeout_s: float, secret: str, host: bool = False
    ) -> None:
        """`timeout_s` bounds calls without a bound of their own. The host serves from here on,
        RefitError if it cannot; the others connect at their first call.
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
    def connected(self) -> bool:
        """Whether the host has answered the last call."""
        return self._server is not None or self._client is not None

    def put(self, key: str, content: bytes) -> None:
        """Set the value of a key."""
        request = Request(PUT, (key,), body=content)
        self._ask(self._timeout_s, lambda keeper: keeper.perform(request))

    def get(self, key: str, timeout_s: float, missing: str) -> bytes:
        """The value of a key, once it exists; RefitError with `missing` if it does not in time."""
        request = Request(GET, (key,), timeout_s)
        reply = self._ask(timeout_s, lambda keeper: keeper.perform(request))
        if not reply.found:
            raise RefitError(missing)
        return reply.body

    def find(self, key: str) -> bytes | None:
        """The value of a key, None if it does not exist now."""
        request = Request(GET, (key,))
        reply = self._ask(self._timeout_s, lambda keeper: keeper.perform(request))
        return reply.body if reply.found else None

    def drop(self, keys: Iterable[str]) -> None:
        """Delete keys. For the host."""
        request = Request(DROP, tuple(keys))
        self._ask(self._timeout_s, lambda keeper: keeper.perform(request))

    def count(self) -> int:
        """The number of keys, including those of process groups that met here."""
        return self._ask(self._timeout_s, lambda keeper: keeper.perform(Request(COUNT))).number

    def process_group(
        self, name: str, rank: int, size: int, timeout_s: float
    ) -> BoundedProcessGroup:
        """Meet the other `size - 1` processes under a name that is new to this store."""

        def meet(_: KeyValue) -> BoundedProcessGroup:
            # A connection of its own: a group may wait in it, and from a thread of torch's.
            client = self._connected(timeout_s) if self._values is None else None
            store = TorchControlStore(client or self._own(), timeout_s)

            def leave() -> None:
                if client is not None:
                    client.close()

            try:
                return run_with_timeout(
                    timeout_s + _GRACE_S,
                    lambda: BoundedProcessGroup(name, store, rank, size, timeout_s, leave),
                )
            except TimeoutError as error:
                leave()
                raise RefitError(self._words(str(error))) from error
            except BaseException:
                leave()
                raise

        return self._ask(timeout_s, meet)

    def close(self) -> None:
        """Leave. The host's values are gone then."""
        self._forget()
        if self._server is not None:
            self._server.close()
        self._server = None

    def _own(self) -> KeyValueStore:
        assert self._values is not None, "only the host has the values itself"
        return self._values

    def _ask(self, timeout_s: float, step: Callable[[KeyValue], T]) -> T:
        """The result of `step`, which sends requests."""
        if self._values is not None:
            return step(self._values)
        known = self._client
        try:
            self._client = known or self._connected(timeout_s)
            return step(self._client)
        except OSError as error:
            self._forget()
            # The host can have been restarted. One that is only silent would stay silent.
            if known is not None and not isinstance(error, TimeoutError):
                return self._ask(timeout_s, step)
            raise RefitError(self._words(str(error))) from error

    def _connected(self, timeout_s: float) -> ControlClient:
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
            except RefitError as error:
                raise RefitError(self._words(str(error))) from error
            except OSError as error:
                if time.monotonic() + _RETRY_S > end:
                    raise RefitError(self._words(str(error))) from error
            time.sleep(_RETRY_S)

    def _forget(self) -> None:
        """Close the connection: after a failure it is of no use."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _words(self, what: str) -> str:
        ip, port = self._at
        return (
            f"training rank 0, at {ip}:{port}, cannot be reached: {what}. Is it running, and did "
            "it call init_collective with this address?"
        )
