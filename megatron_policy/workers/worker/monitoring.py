"""What one rank says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_policy.monitoring import PolicyReport
    from megatron_policy.policy import MegatronPolicy


class WorkerMonitoring:
    """The rank's policy in words and numbers."""

    policy: MegatronPolicy

    def summary(self) -> str:
        """See `MegatronPolicy.summary`."""
        return self.policy.summary()

    def report(self) -> PolicyReport:
        """See `MegatronPolicy.report`."""
        return self.policy.report()

    def write_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """To this rank's own writers, if its configuration names any; a driver has its own."""
        self.policy.write_metrics(metrics, step=step)
