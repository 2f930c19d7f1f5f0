"""The driver's part in what a policy says of itself: records what all workers have measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_policy.config import MetricsConfig, PolicyConfig
from megatron_policy.monitoring import PolicyReport
from megatron_policy.monitoring.metrics_log import MetricsLog, checked_metrics
from megatron_policy.monitoring.writers import configured_writers

if TYPE_CHECKING:
    from megatron_policy.checkpoint.report import LoadReport
    from megatron_policy.interfaces.metrics import MetricsWriter
    from megatron_policy.training.results import TrainResult
    from megatron_policy.workers.cluster.group import WorkerGroup

_log = logging.getLogger(__name__)


class DriverMonitoring:
    """Metrics, a summary and a report, in the driver's process."""

    config: PolicyConfig
    _workers: WorkerGroup
    _metrics: MetricsLog
    _steps: int

    def summary(self) -> str:
        """Model, layout, precision, optimizer, batches, memory and versions, in lines of at most 80
        columns; numbers of one rank are rank 0's. It is logged at the start, at level INFO.
        """
        summaries: list[str] = self._workers.run_all("summary")
        return summaries[0]

    def report(self) -> PolicyReport:
        """Memory now, of the ranks with most and with least, and speed and balance of the last
        training calls.
        """
        return PolicyReport.merged(self._workers.run_all("report"))

    def write_metrics(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Hand numbers of your own, such as rewards, to the writers, by default as of the last
        optimizer step. ConfigError for what is not a number.
        """
        self._metrics.write(self._steps if step is None else step, checked_metrics(metrics))

    def _open_metrics(self, writers: Sequence[MetricsWriter]) -> None:
        """Before any worker starts: ConfigError where a package is missing."""
        self._metrics = MetricsLog([*writers, *configured_writers(self.config.metrics)])
        self._steps = 0

    def _start_monitoring(self, loaded: LoadReport | None) -> None:
        """Continue the count of steps where the workers, who are ready, do; log the summary."""
        if loaded is not None:
            self._steps = loaded.step
        if _log.isEnabledFor(logging.INFO):
            _log.info("the policy is ready\n%s", self.summary())

    def _trained(self, result: TrainResult, eval_mode: bool = False) -> TrainResult:
        """The result, once it is recorded."""
        self._steps = result["step"]
        self._metrics.trained(result, result["microbatch_metrics"], eval_mode=eval_mode)
        return result


def of_workers(config: PolicyConfig) -> PolicyConfig:
    """The configuration without writers, which are the driver's."""
    return config.model_copy(update={"metrics": MetricsConfig()})
