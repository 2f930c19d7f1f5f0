"""Letters between processes of a test that share nothing but a folder."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

WAIT_S = 120.0


class Mailbox:
    """Values by name, each written once and read by any number of processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, value: Any = None) -> None:
        """Leave a value."""
        partial = self._folder / f".{name}.partial"
        partial.write_bytes(pickle.dumps(value))
        partial.rename(self._folder / name)

    def get(self, name: str) -> Any:
        """The value of that name, as soon as it is there."""
        path, end = self._folder / name, time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < end, f"nobody has left {name}"
            time.sleep(0.005)
        return pickle.loads(path.read_bytes())
