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

    OSError if all of `PORTS` are taken.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:  # taken: try the next
                continue
            yield port
            return
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on this machine")
