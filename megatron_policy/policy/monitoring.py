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
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.memory.states import Kind
from megatron_policy.monitoring.metrics_log import (
    MetricsLog,
    checked_metrics,
    merge_microbatches,
)
from megatron_policy.monitoring.report import MemoryUse, PolicyReport
from megatron_policy.monitoring.summary import estimate_memory, summarize
from megatron_policy.policy.checkpointing import AnyPath
from megatron_policy.policy.profiling import Profile, profiling
from megatron_policy.policy.session import Session
from megatron_policy.training.results import TrainResult

_log = logging.getLogger(__name__)


class PolicyMonitoring:
    """What a policy tells whoever watches it: records, a summary, a report, profiles. `profile` and
    what is not public are collective.

    Attributes:
        metrics (MetricsLog): what is handed to the writers; rank 0 alone has any.
    """

    def __init__(
        self, config: PolicyConfig, session: Session, writers: Sequence[MetricsWriter]
    ) -> None:
        self._config, self._session = config, session
        world = dist.group.WORLD
        assert world is not None, "the session has joined it"
        self._any_writers = bool(find_largest([len(writers)], world)[0])
        self.metrics = MetricsLog(writers if session.rank == 0 else ())

    def announce(self) -> None:
        """Log the summary of a policy that is ready, on rank 0."""
        if self._session.rank == 0 and _log.isEnabledFor(logging.INFO):
            _log.info("the policy is ready\n%s", self.summary())

    def summary(self) -> str:
        """Model, layout, precision, optimizer, batches, memory and versions, in lines of at most 80
        columns; after `shutdown` the first says so. Rank 0 logs it at the start, at level INFO.
        """
        of = self._session
        held = (of.engine, of.topology, of.memory, of.reference_bytes)
        return summarize(self._config, *held, closed=of.state.closed)

    def report(self) -> PolicyReport:
        """This rank's memory now, the speed and balance of its last training calls, and how far the
        log-probabilities of rollouts were from training's.
        """
        memory = self._session.memory
        here = memory.resident_bytes()
        use = MemoryUse(
            parameters=here[Kind.PARAMETERS],
            gradients=here[Kind.GRADIENTS],
            optimizer=here[Kind.OPTIMIZER],
            reference_on_host=self._session.reference_bytes,
            offloaded_on_host=memory.host_bytes,
            activations_expected=self._activations,
            peak=device.memory_info().peak,
        )
        log = self.metrics
        steps = self._session.state.steps
        return PolicyReport.of_rank(steps, use, tuple(log.speeds), log.mismatch)

    def write_metrics(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Hand numbers of your own, such as rewards, to the writers, by default as of the last
        optimizer step. Only rank 0 writes. ConfigError for what is not a number.
        """
        at = self._session.state.steps if step is None else step
        self.metrics.write(at, checked_metrics(metrics))

    def profile(
        self, folder: AnyPath, *, operations: bool = True
    ) -> AbstractContextManager[Profile]:
        """In this context, record what the policy does; collective. At its end write to `folder`: a
        Chrome trace of each rank with its `operations`, unless they are not wanted, a trace and a
        picture of the passes of all ranks, and a summary.

        After an error in the context nothing is written. ConfigError if a profile is open.
        """
        return profiling(self._session.engine, self._session.topology, folder, operations)

    @cached_property
    def _activations(self) -> int | None:
        expected = estimate_memory(self._config, self._session.engine, self._session.topology)
        return None if expected is None else expected.activations + expected.head

    def record_training(self, result: TrainResult, eval_mode: bool = False) -> TrainResult:
        """The result with the number of steps taken, once it is recorded. Collective over the
        data-parallel ranks where anything writes: they have the metrics of their own microbatches.
        """
        of = self._session
        result["step"] = of.state.steps
        parts = None
        if self._any_writers and of.rank in of.topology.reporters():
            own = [result["microbatch_metrics"]]
            parts = merge_microbatches(gather_lists(own, of.engine.groups.dp))
        self.metrics.trained(result, parts, eval_mode=eval_mode)
        return result
