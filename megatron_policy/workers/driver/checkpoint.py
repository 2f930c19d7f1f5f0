"""The driver's part in training checkpoints: calls all workers; reads and writes nothing itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_policy.workers.checks import refuse_unknown

if TYPE_CHECKING:
    from megatron_policy.checkpoint.report import LoadReport, SaveReport
    from megatron_policy.config import PolicyConfig
    from megatron_policy.monitoring.metrics_log import MetricsLog
    from megatron_policy.workers.cluster.group import WorkerGroup

PathLike = str | os.PathLike[str]


class DriverCheckpoint:
    """Training checkpoints, from the driver of the workers.

    Every rank reads and writes its part, so paths must be on storage that all nodes share. The
    policy remains usable after a CheckpointError.
    """

    config: PolicyConfig
    _workers: WorkerGroup
    _metrics: MetricsLog
    _steps: int
    _save_under_way = False

    def save_checkpoint(
        self,
        weights_path: PathLike,
        optimizer_path: PathLike | None = None,
        tokenizer_path: PathLike | None = None,
        checkpointing_cfg: Any = None,
        *,
        host_data: Mapping[str, Any] | None = None,
        hf_export: PathLike | None = None,
        **options: Any,
    ) -> SaveReport | None:
        """Write a training checkpoint into `iter_*` below `weights_path`, and the optimizer's state
        likewise below `optimizer_path` (None saves none); see `MegatronPolicy.save_checkpoint`.
        `checkpointing_cfg` is the host's and has no effect.

        A checkpoint appears when it is complete. With `megatron_cfg.checkpoint.async_save` this
        returns when workers have begun to copy; a later failure is raised by the next call of this
        class or by `shutdown`. Returns what was written and how fast, unless `async_save`: then
        `finalize_async_save` does. CheckpointError names the file, the problem and the remedy.
        """
        refuse_unknown("save_checkpoint", options)
        self._save_under_way = self.config.megatron_cfg.checkpoint.async_save
        reports = self._workers.run_all(
            "save_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            tokenizer_path=absolute(tokenizer_path),
            host_data=host_data,
            hf_export=absolute(hf_export),
        )
        report = slowest(reports)
        self._metrics.saved(report)
        return report

    def load_checkpoint(
        self,
        weights_path: PathLike,
        optimizer_path: PathLike | None = None,
        *,
        fresh_optimizer: bool | None = None,
    ) -> LoadReport:
        """Resume from the last complete checkpoint in `weights_path`, saved under any layout, or
        from an `iter_*` directory; see `MegatronPolicy.load_checkpoint`.

        CheckpointError, before anything is changed, if any of it is damaged, missing or another
        model's, including a missing optimizer state unless `fresh_optimizer` (default:
        `megatron_cfg.checkpoint.fresh_optimizer`).
        """
        reports: list[LoadReport] = self._workers.run_all(
            "load_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            fresh_optimizer=fresh_optimizer,
        )
        report = merged(reports)
        assert report is not None, "there are workers"
        self._steps = report.step
        return report

    def get_load_report(self) -> LoadReport | None:
        """What a start from a checkpoint has restored; None without such a start."""
        reports: list[LoadReport | None] = self._workers.run_all("get_load_report")
        return merged([each for each in reports if each is not None])

    def finalize_async_save(self) -> SaveReport | None:
        """Wait for a background save to complete, and return the report of the last one;
        CheckpointError if it failed.

        Not needed before the next save and `shutdown`, which wait by themselves.
        """
        self._save_under_way = False
        report = slowest(self._workers.run_all("finalize_async_save"))
        self._metrics.saved(report)
        return report

    def _drain_saves(self) -> None:
        """Call `finalize_async_save` if a save may be running and the workers are usable."""
        if self._save_under_way and self._workers.usable:
            self.finalize_async_save()


def merged(reports: Sequence[LoadReport]) -> LoadReport | None:
    """One report for all ranks: only what every rank restored counts as restored."""
    if not reports:
        return None
    missing = {what: why for each in reports for what, why in each.not_restored.items()}
    restored = tuple(what for what in reports[0].restored if what not in missing)
    return replace(reports[0], restored=restored, not_restored=missing)


def slowest(reports: Sequence[SaveReport | None]) -> SaveReport | None:
    """The report of the rank whose save took longest; None without any."""
    return max(filter(None, reports), key=lambda report: report.seconds, default=None)


def absolute(path: PathLike | None) -> str | None:
    """The absolute path, for workers, which run in their own directories."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))
