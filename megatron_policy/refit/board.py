"""Where trainer and engines of one refit group leave each other notes: a store that no call waits
for longer than it was told. Knows nothing of what the notes say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_policy.errors import RefitError
from megatron_policy.refit.channels import Channel
from megatron_policy.refit.patience import within

T = TypeVar("T")

_PIECE = 4 * 2**20
"""Bytes of a note that go into one value: torch's store takes 8 MiB at most."""

_GRACE_S = 0.5
"""How much longer than a store's own timeout to wait for it: it gives the better message."""


class Board:
    """Notes by key, kept at (ip, port) by the process that is the host.

    Every method raises RefitError when the host does not answer; the next call then connects anew.
    """

    def __init__(self, ip: str, port: int, timeout_s: float, host: bool = False) -> None:
        """`timeout_s` bounds what has no bound of its own. The host keeps the notes from here on,
        RefitError if it cannot; the others connect at their first call.
        """
        self._at, self._timeout_s, self._host = (ip, port), timeout_s, host
        self._store: Any = None
        if host:
            self._within(timeout_s, lambda store: None)

    @property
    def connected(self) -> bool:
        """Whether the host has answered the last call."""
        return self._store is not None

    def put(self, key: str, content: bytes) -> None:
        """Leave a note, in place of one of that key."""
        pieces = [content[at : at + _PIECE] for at in range(0, len(content), _PIECE)] or [b""]

        def write(store: dist.Store) -> None:
            for number, piece in enumerate(pieces[1:], 1):
                store.set(f"{key}/{number}", piece)
            # Last: who waits for the note finds all of it. The number says that it is stored.
            store.set(key, b"%d\n" % len(pieces) + pieces[0])
            store.check([key])

        self._within(self._timeout_s, write)

    def get(self, key: str, timeout_s: float, missing: str) -> bytes:
        """The note of that key, once it is there; RefitError with `missing` if it does not come."""
        found = self._within(timeout_s, lambda store: self._read(store, key, timeout_s))
        if found is None:
            raise RefitError(missing)
        return found

    def find(self, key: str) -> bytes | None:
        """The note of that key if it is there now."""

        def look(store: dist.Store) -> bytes | None:
            return self._read(store, key, self._timeout_s) if store.check([key]) else None

        return self._within(self._timeout_s, look)

    def drop(self, keys: Iterable[str]) -> None:
        """Take notes away; for the host."""

        def delete(store: dist.Store) -> None:
            for key in keys:
                number = 1
                if store.delete_key(key):
                    while store.delete_key(f"{key}/{number}"):
                        number += 1

        self._within(self._timeout_s, delete)

    def channel(self, name: str, rank: int, size: int, timeout_s: float) -> Channel:
        """Meet the other `size - 1` processes under a name that is new to this board."""
        return self._within(timeout_s, lambda store: Channel(name, store, rank, size, timeout_s))

    def close(self) -> None:
        """Leave; the notes of the host are gone."""
        self._store = None

    def _read(self, store: dist.Store, key: str, timeout_s: float) -> bytes | None:
        try:
            store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
        except dist.DistStoreError as error:
            if "timeout" in str(error).lower():
                return None
            raise
        count, _, content = store.get(key).partition(b"\n")
        rest = [store.get(f"{key}/{number}") for number in range(1, int(count))]
        return b"".join([content, *rest])

    def _within(self, timeout_s: float, step: Callable[[Any], T]) -> T:
        """What `step` makes of the store."""
        known = self._store

        def attempt() -> tuple[Any, T]:
            store = self._connected() if known is None else known
            return store, step(store)

        try:
            self._store, value = within(timeout_s + _GRACE_S, attempt)
        except TimeoutError as error:
            self._forget()
            raise RefitError(self._words(f"no answer within {timeout_s:g} s")) from error
        except RefitError:
            raise
        except RuntimeError as error:
            self._forget()
            if known is not None and self._store is None:
                return self._within(timeout_s, step)  # perhaps the host was started anew
            raise RefitError(self._words(str(error).splitlines()[0])) from error
        return value

    def _connected(self) -> Any:
        ip, port = self._at
        timeout = timedelta(seconds=self._timeout_s)
        return dist.TCPStore(ip, port, None, self._host, timeout, wait_for_workers=False)

    def _forget(self) -> None:
        """A connection that failed is of no use; the host's is the notes themselves."""
        if not self._host:
            self._store = None

    def _words(self, what: str) -> str:
        ip, port = self._at
        if self._host:
            return f"the refit group cannot be kept at {ip}:{port}: {what}. Choose a free port"
        return (
            f"training rank 0, at {ip}:{port}, cannot be reached: {what}. Is it running, and did "
            "it call init_collective with this address?"
        )
