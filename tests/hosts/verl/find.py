"""`import verl` finds verl where it is installed, with a CPU platform, and else the stand-in."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

STANDIN = str(Path(__file__).parent / "standin")


def find_verl() -> None:
    """To be called before modules that import verl are imported."""
    if "verl" in sys.modules:
        return
    found = importlib.util.find_spec("verl")
    if found is None:
        # Not left on the path, which processes of other tests inherit.
        sys.path.insert(0, STANDIN)
        try:
            importlib.import_module("verl.checkpoint_engine.base")
        finally:
            sys.path.remove(STANDIN)
    elif not str(found.origin).startswith(STANDIN):
        import examples.verl.cpu_platform  # noqa: F401
