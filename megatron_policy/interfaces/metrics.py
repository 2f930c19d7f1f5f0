"""The protocol of what records a policy's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MetricsWriter(Protocol):
    """Where a policy's numbers go: one record after each training step, and for what else has any.

    Only one process calls it: rank 0, or the driver. A writer that raises is not called again; the
    policy goes on.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers by name. `step` is how many optimizer steps were taken, which a policy
        that is resumed continues; it repeats where several records belong to one step, and after a
        resume from an earlier checkpoint it goes back.
        """

    def close(self) -> None:
        """Finish what is open. A later `write` can open it again."""
