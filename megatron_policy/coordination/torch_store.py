"""A control store as the store in which a process group of torch meets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_policy.coordination.key_value import (
    ADD,
    COUNT,
    DROP,
    GET,
    PUT,
    WAIT,
    KeyValue,
    Reply,
    Request,
)
from megatron_policy.errors import RefitError


class TorchControlStore(dist.Store):
    """What process groups need of a store. DistStoreError if a key does not appear in time or the
    control store cannot be reached.

    torch calls it from threads of its own, and holds no reference that keeps it alive.
    """

    def __init__(self, keeper: KeyValue, timeout_s: float) -> None:
        super().__init__()
        self._keeper, self._timeout_s = keeper, timeout_s
        self._one_at_a_time = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(Request(PUT, (key,), body=content))

    def get(self, key: str) -> bytes:
        """The value, once it exists."""
        return self._ask(Request(GET, (key,), self._timeout_s)).body

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask(Request(WAIT, tuple(keys), limit))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return self._ask(Request(WAIT, tuple(keys)), missing=False).found

    def add(self, key: str, number: int) -> int:
        """Add to the number of that key; returns the sum."""
        return self._ask(Request(ADD, (key,), number=number)).number

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return self._ask(Request(DROP, (key,)), missing=False).found

    def num_keys(self) -> int:
        """The number of keys of the whole control store."""
        return self._ask(Request(COUNT)).number

    @property
    def timeout(self) -> timedelta:
        """How long a key is waited for."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a key is waited for."""
        self._timeout_s = timeout.total_seconds()

    def _ask(self, request: Request, missing: bool = True) -> Reply:
        with self._one_at_a_time:
            try:
                reply = self._keeper.perform(request)
            except (OSError, RefitError) as error:
                raise dist.DistStoreError(f"the refit group's notes: {error}") from error
        if missing and not reply.found:
            raise dist.DistStoreError(
                f"timeout: {', '.join(request.keys)} were not set within {request.timeout_s:g} s"
            )
        return reply
