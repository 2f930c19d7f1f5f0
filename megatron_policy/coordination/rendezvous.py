"""Ports at which the ranks of one machine meet."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

# Below the ports that the kernel hands out by itself (32768 and up), which an outgoing connection
# may take at any time, and above Ray's own worker ports (10002-19999).
PORTS = range(20000, 30000)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port nobody else is given meanwhile: bound, not listening, so that rank 0 still can.

    Bound alone at first: Linux lets sockets share a port that all say may be reused, until one of
    them listens (socket(7), SO_REUSEADDR). Said afterwards, it lets in the listener alone.

    OSError if all of `PORTS` are taken.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as holder:
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:  # taken: try the next
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield port
            return
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on this machine")
