"""What a policy says of itself: its metrics to writers, a summary, a report, profiles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch.distributed as dist

from megatron_policy import device
from megatron_policy.config import PolicyConfig
from megatron_policy.coordination.agreement import find_largest, gather_lists
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import Kind
from megatron_policy.monitoring.metrics_log import (
    MetricsLog,
    checked_metrics,
    merge_microbatches,
)
from megatron_policy.monitoring.report import MemoryUse, PolicyReport
from megatron_policy.monitoring.summary import estimate_memory, summarize
from megatron_policy.parallel.topology import Topology
from megatron_policy.policy.checkpointing import AnyPath
from megatron_policy.policy.profiling import Profile, profiling
from megatron_policy.policy.session import Session
from megatron_policy.training.results import TrainResult

_log = logging.getLogger(__name__)


class PolicyMonitoring:
    """The methods of `MegatronPolicy` for whoever watches it. Only `profile` is collective."""

    config: PolicyConfig
    memory: DeviceMemory
    topology: Topology
    rank: int
    steps: int
    _engine: TrainingEngine
    _session: Session
    _metrics: MetricsLog
    _records: bool
    """Whether any rank has writers."""

    def summary(self) -> str:
        """Model, layout, precision, optimizer, batches, memory and versions, in lines of at most 80
        columns; after `shutdown` the first says so. Rank 0 logs it at the start, at level INFO.
        """
        held = (self._engine, self.topology, self.memory, self._session.reference_bytes)
        return summarize(self.config, *held, closed=self._session.state.closed)

    def report(self) -> PolicyReport:
        """This rank's memory now, and the speed and balance of its last training calls."""
        here = self.memory.resident_bytes()
        use = MemoryUse(
            parameters=here[Kind.PARAMETERS],
            gradients=here[Kind.GRADIENTS],
            optimizer=here[Kind.OPTIMIZER],
            reference_on_host=self._session.reference_bytes,
            offloaded_on_host=self.memory.host_bytes,
            activations_expected=self._activations,
            peak=device.memory_info().peak,
        )
        return PolicyReport.of_rank(self.steps, use, tuple(self._metrics.speeds))

    def write_metrics(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Hand numbers of your own, such as rewards, to the writers, by default as of the last
        optimizer step. Only rank 0 writes. ConfigError for what is not a number.
        """
        self._metrics.write(self.steps if step is None else step, checked_metrics(metrics))

    def profile(
        self, folder: AnyPath, *, operations: bool = True
    ) -> AbstractContextManager[Profile]:
        """In this context, record what the policy does; collective. At its end write to `folder`: a
        Chrome trace of each rank with its `operations`, unless they are not wanted, a trace and a
        picture of the passes of all ranks, and a summary.

        After an error in the context nothing is written. ConfigError if a profile is open.
        """
        return profiling(self._engine, self.topology, folder, operations)

    @cached_property
    def _activations(self) -> int | None:
        expected = estimate_memory(self.config, self._engine, self.topology)
        return None if expected is None else expected.activations + expected.head

    def _start_monitoring(self, writers: Sequence[MetricsWriter]) -> None:
        """Log the summary, and keep rank 0's writers; collective."""
        world = dist.group.WORLD
        assert world is not None, "the session has joined it"
        self._records = bool(find_largest([len(writers)], world)[0])
        self._metrics = MetricsLog(writers if self.rank == 0 else ())
        if self.rank == 0 and _log.isEnabledFor(logging.INFO):
            _log.info("the policy is ready\n%s", self.summary())

    def _trained(self, result: TrainResult, eval_mode: bool = False) -> TrainResult:
        """The result with the number of steps taken, once it is recorded. Collective over the
        data-parallel ranks where anything writes: they have the metrics of their own microbatches.
        """
        result["step"] = self.steps
        parts = None
        if self._records and self.rank in self.topology.reporters():
            own = [result["microbatch_metrics"]]
            parts = merge_microbatches(gather_lists(own, self._engine.groups.dp))
        self._metrics.trained(result, parts, eval_mode=eval_mode)
        return result
