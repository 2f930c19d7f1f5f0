"""Which rank of the default process group has left it or has died first, heard at once.

The store in which ranks meet says nothing of a client that is gone. So each rank has connections to
rank 0, which break when its process ends. Where they cannot be made, silence has to tell.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist

from megatron_policy.coordination.authenticated_connection import new_secret
from megatron_policy.coordination.control_server import LONGEST_S
from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import RefitError

_log = logging.getLogger(__name__)

_LOST = "lost"
_PAUSE_S, _CONNECT_S = 0.05, 30.0


def watch_ranks(group: dist.ProcessGroup, store: dist.Store) -> Callable[[], str]:
    """A function that says which rank of the default `group`, which met in that store, was lost
    first; nothing as long as all are there. Every rank calls it. Another rank than 0 waits here for
    rank 0, so that its own end is heard of from here on.
    """
    if group not in _watches:
        watch = _watches[group] = _RankWatch(store, group.rank())
        # At the end of a process its connections break by themselves.
        finalize(group, watch.close).atexit = False
    return _watches[group].find_lost


class _RankWatch:
    """One rank's end."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        # The store can have been that of another group before.
        number = store.add(f"{_LOST}/of rank {rank}", 1)
        self._store, self._rank, self._key = store, rank, f"{_LOST}/{number}"
        self._lost, self._closed = "", False
        self._host: ControlStore | None = None
        self._ends: list[ControlStore] = []
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            try:
                (self._join if rank else self._serve)(store.host)
            except (OSError, RuntimeError, RefitError) as error:
                _log.info("only silence will tell of lost ranks: %s", error)

    def find_lost(self) -> str:
        """The first rank that was lost, in words; empty if there is none."""
        if self._host is not None and not self._lost:
            self._lost = (self._host.find(_LOST) or b"").decode()
        return self._lost

    def close(self) -> None:
        """Leave: the others hear of it."""
        self._closed = True
        if self._host is not None:
            self._host.put(_LOST, _describe(0).encode(), unless=_LOST)
        for end in self._ends:
            end.close()

    def _serve(self, name: str) -> None:
        """Rank 0's part. Its store is at that name, by which the others reach it."""
        at = ""
        try:
            family = socket.getaddrinfo(name, None)[0][0]
            everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
            secret = new_secret()
            self._host = ControlStore(everywhere, 0, _CONNECT_S, secret, host=True)
            self._ends.append(self._host)
            at = f"{self._host.port} {secret}"
        finally:
            self._store.set(self._key, at)

    def _join(self, name: str) -> None:
        """Another rank's part. Rank 0's store is at that name."""
        end = time.monotonic() + _CONNECT_S
        while not self._store.check([self._key]):
            if time.monotonic() > end:
                raise RefitError("rank 0 has not come")
            time.sleep(_PAUSE_S)
        port, _, secret = self._store.get(self._key).decode().partition(" ")
        if not port:
            raise RefitError("rank 0 hears of none")
        at = name, int(port), _CONNECT_S, secret
        own, others = ControlStore(*at), ControlStore(*at)  # one waits while the other is there
        self._ends += own, others
        own.put_at_end(_LOST, _describe(self._rank).encode())
        others.find(_LOST)
        start_thread(
            threading.Thread(target=self._listen, args=(others,), daemon=True, name="lost-ranks")
        )

    def _listen(self, others: ControlStore) -> None:
        """Wait until a rank is lost."""
        while not self._lost and not self._closed:
            try:
                self._lost = others.get(_LOST, LONGEST_S, "", unless=_LOST).decode()
            except RefitError:
                self._lost = "" if others.connected else _describe(0)


def _describe(rank: int) -> str:
    return f"rank {rank} has left, or was ended: look into its log"


_watches: WeakKeyDictionary[dist.ProcessGroup, _RankWatch] = WeakKeyDictionary()
