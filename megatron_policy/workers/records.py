"""What a driver's policy leaves behind: checkpoints, exports, metrics, reports and profiles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_policy.config import PolicyConfig
from megatron_policy.monitoring import PolicyReport
from megatron_policy.monitoring.metrics_log import MetricsLog, checked_metrics
from megatron_policy.policy.profiling import Profile
from megatron_policy.workers.checks import refuse_unknown
from megatron_policy.workers.cluster.group import WorkerGroup

if TYPE_CHECKING:
    from megatron_policy.checkpoint.report import LoadReport, SaveReport

PathLike = str | os.PathLike[str]


class RecordingDriver:
    """Saves, exports, reports and profiles. Every rank writes its part of a checkpoint or an
    export, so paths must be on storage that all nodes share.
    """

    def __init__(self, config: PolicyConfig, workers: WorkerGroup, metrics: MetricsLog) -> None:
        self._config, self._workers, self._metrics = config, workers, metrics
        self._saves = False
        """Whether a background save may be running."""

    def export_hf(
        self, path: PathLike, *, max_shard_bytes: int | None = None, overwrite: bool = False
    ) -> None:
        """Write a Hugging Face checkpoint; see `MegatronPolicy.export_hf`.

        Every rank writes its part, so `path` must be on storage that all nodes share. The policy
        remains usable after an ExportError.
        """
        size = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
        path = os.path.abspath(path)
        self._workers.run_all("export_hf", path=path, overwrite=overwrite, **size)

    def export_peft(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write the adapters as PEFT does; see `MegatronPolicy.export_peft`. Rank 0 writes."""
        self._workers.run_all("export_peft", path=os.path.abspath(path), overwrite=overwrite)

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
        Every rank writes its part, so paths must be on storage that all nodes share.
        `checkpointing_cfg` is the host's and has no effect.

        A checkpoint appears when it is complete. With `megatron_cfg.checkpoint.async_save` this
        returns when workers have begun to copy; a later failure is raised by the next call of this
        class or by `shutdown`. Returns what was written and how fast, unless `async_save`: then
        `finalize_async_save` does. CheckpointError names the file, the problem and the remedy; the
        policy remains usable.
        """
        refuse_unknown("save_checkpoint", options)
        self._saves = self._config.megatron_cfg.checkpoint.async_save
        reports = self._workers.run_all(
            "save_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            tokenizer_path=absolute(tokenizer_path),
            host_data=host_data,
            hf_export=absolute(hf_export),
        )
        return self._record_save(reports)

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
        reports = self._workers.run_all(
            "load_checkpoint",
            weights_path=absolute(weights_path),
            optimizer_path=absolute(optimizer_path),
            fresh_optimizer=fresh_optimizer,
        )
        report = merge_loads(reports)
        self._metrics.step = report.step
        return report

    def get_load_report(self) -> LoadReport | None:
        """What a start from a checkpoint has restored; None without such a start."""
        reports = self._workers.run_all("get_load_report")
        return merge_loads(reports) if all(reports) else None

    def follow_start(self) -> None:
        """Count steps from those of the checkpoint that the workers have started from."""
        if loaded := self.get_load_report():
            self._metrics.step = loaded.step

    def finalize_async_save(self) -> SaveReport | None:
        """Wait for a background save to complete, and return the report of the last one;
        CheckpointError if it failed.

        Not needed before the next save and `shutdown`, which wait by themselves.
        """
        self._saves = False
        return self._record_save(self._workers.run_all("finalize_async_save"))

    def close(self) -> None:
        """Wait for a background save, if the workers still answer, and close the writers.
        CheckpointError or WorkerError if the save failed.
        """
        try:
            if self._saves and self._workers.usable:
                self.finalize_async_save()
        finally:
            self._metrics.close()

    def _record_save(self, reports: Iterable[SaveReport | None]) -> SaveReport | None:
        """The report of the rank whose save took longest, once it is recorded."""
        longest = max(filter(None, reports), key=lambda report: report.seconds, default=None)
        self._metrics.saved(longest)
        return longest

    def summary(self) -> str:
        """Model, layout, precision, optimizer, batches, memory and versions, in lines of at most 80
        columns; numbers of one rank are rank 0's. It is logged at the start, at level INFO.
        """
        summaries: list[str] = self._workers.run_all("summary")
        return summaries[0]

    def report(self) -> PolicyReport:
        """Memory now, of the ranks with most and with least, speed and balance of the last training
        calls, and how far the log-probabilities of rollouts were from training's.
        """
        return PolicyReport.merged(self._workers.run_all("report"))

    def write_metrics(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Hand numbers of your own, such as rewards, to the writers, by default as of the last
        optimizer step. ConfigError for what is not a number.
        """
        self._metrics.write(self._metrics.step if step is None else step, checked_metrics(metrics))

    def start_gpu_profiling(self) -> None:
        """Start a range for waiting profilers of the workers; without GPUs do nothing."""
        self._workers.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        self._workers.run_all("stop_gpu_profiling")

    @contextmanager
    def profile(
        self, folder: str | os.PathLike[str], *, operations: bool = True
    ) -> Iterator[Profile]:
        """In this context, record what the workers do; see `MegatronPolicy.profile`. `folder` is on
        the workers' nodes: rank 0 writes the summary, each rank its trace.
        """
        path = os.path.abspath(os.path.expanduser(folder))
        self._workers.run_all("begin_profile", folder=path, operations=operations)
        profile = Profile.at(path)
        try:
            yield profile
        except BaseException as error:
            try:
                self._workers.run_all("end_profile", failed=True)
            except Exception as failure:  # a worker that died is the error itself
                error.add_note(f"The profile of the workers was not closed: {failure}")
            raise
        profile.take(self._workers.run_all("end_profile")[0])


def merge_loads(reports: Sequence[LoadReport]) -> LoadReport:
    """One report for all ranks: only what every rank restored counts as restored."""
    missing = {what: why for each in reports for what, why in each.not_restored.items()}
    restored = tuple(what for what in reports[0].restored if what not in missing)
    return replace(reports[0], restored=restored, not_restored=missing)


def absolute(path: PathLike | None) -> str | None:
    """The absolute path, for workers, which run in their own directories."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))
