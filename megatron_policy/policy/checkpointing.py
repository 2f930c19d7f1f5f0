"""Saving and loading a policy: what is written, and what state it is in after a load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megatron_policy.adapters.peft_files import peft_contents
from megatron_policy.checkpoint import common_state, tracker
from megatron_policy.checkpoint.contents import Contents, NonTensorState, saved_by
from megatron_policy.checkpoint.kept_files import KeptFiles
from megatron_policy.checkpoint.loading import FoundCheckpoint, Loader, LoadPlan
from megatron_policy.checkpoint.report import LoadReport, SaveReport, check_host_data
from megatron_policy.checkpoint.saving import DirectoryContents, SavedModel, Saver
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.files.publishing import check_replaceable, is_checkpoint
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.formats.side_files import (
    save_tokenizer,
    side_files,
    side_paths,
)
from megatron_policy.coordination.operation import SAVES, Coordinator
from megatron_policy.errors import ConfigError
from megatron_policy.memory.states import SAVE, SEND_WEIGHTS
from megatron_policy.policy.session import Session
from megatron_policy.refit.exporter import Origin
from megatron_policy.refit.transports.disk import HfDirectory, check_export
from megatron_policy.weights.load import refuse_unfilled

_log = logging.getLogger(__name__)

AnyPath = str | PathLike[str]


class Checkpoints:
    """One rank's part in all saves and loads of its policy; every method is collective."""

    def __init__(
        self,
        session: Session,
        config: PolicyConfig,
        tokenizer: Any,
        generators: Mapping[str, torch.Generator],
    ) -> None:
        """`generators` are the policy's own random number generators, by name."""
        self._session, self._config, self._tokenizer = session, config, tokenizer
        self._engine = session.engine
        self._contents = Contents(session.engine, session.topology, generators)
        self._coordinator = Coordinator.of_all_ranks(SAVES, config.checkpoint_timeout_s)
        side_paths(locate(config.model_name))  # raises on every rank or on none
        self._kept: KeptFiles | None = None
        if session.rank == 0:
            files = side_files(config.model_name, session.engine.table.overrides)
            self._kept = KeptFiles(files, tokenizer)
        self._saved = saved_by(session.engine)
        adapters = session.engine.adapters
        described = (
            {}
            if adapters is None
            else peft_contents(adapters.spec, adapters.spec.peft_config(adapters.table))
        )
        model = SavedModel(self._saved.table, session.topology, self._kept, described)
        self._saver = Saver(model, self._coordinator)
        session.engine.pending_reads.add(self._saver.copied)
        if config.megatron_cfg.checkpoint.async_save:
            self._saver.reserve(self._contents.nbytes)

    def save(
        self,
        step: int,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None,
        tokenizer_path: AnyPath | None,
        host_data: Mapping[str, Any] | None,
        hf_export: AnyPath | None,
        onload: bool,
    ) -> SaveReport | None:
        """Write `iter_<step>` in `weights_path`: weights, counters and random numbers. With
        `optimizer_path`, which can be the same, also write the optimizer's state. With
        `tokenizer_path` the tokenizer is also written to that directory.

        `host_data`, plain values, is returned in the report of a load. `hf_export` is where the
        caller will export to afterwards: what would make that fail makes this fail. With `onload`
        what is saved is first moved to the device, and stays there; without, it has to be there.
        With `megatron_cfg.checkpoint.async_save` this returns while the copy to host memory is
        still running: whatever changes or moves the policy's memory waits for that copy. The
        report, which other saves return, is then that of `finish`.
        CheckpointError, on every rank, if this save or the one before failed: earlier checkpoints
        are unchanged, and nothing is left of the new one unless the message says so.
        """
        weights, optimizer = _absolute(weights_path), _absolute(optimizer_path)
        assert weights is not None
        need = SEND_WEIGHTS if optimizer is None else SAVE
        memory = self._session.memory

        def check() -> None:
            if optimizer is not None and not self._contents.has_optimizer:
                raise ConfigError(
                    "this policy was made with init_optimizer=False and has no optimizer to save: "
                    "leave optimizer_path out"
                )
            check_host_data({} if host_data is None else host_data)
            _refuse_checkpoints(weights, optimizer)
            here = replace(need, holds=frozenset()) if onload else need
            memory.check("save_checkpoint()", here)
            if hf_export is not None:
                exporter = self._session.exporter
                _refuse_overlap(hf_export, exporter.origin, weights, optimizer)
                if self._session.rank == 0:  # which alone reads what it copies from there
                    check_export(HfDirectory(hf_export, overwrite=True), exporter)

        def parts() -> list[DirectoryContents]:
            if onload:
                memory.onload(need.holds)
            memory.ready("save_checkpoint()", need)
            found = self._contents.parts(step, weights, optimizer, host_data or {})
            if tokenizer_path is not None and self._kept is not None:
                path = Path(tokenizer_path)
                if not save_tokenizer(self._tokenizer, path):
                    self._kept.write(path)
            return found

        wait = not self._config.megatron_cfg.checkpoint.async_save
        purpose = f"save step {step} to {weights}, its optimizer to {optimizer}"
        return self._saver.save(purpose, step, check, parts, wait=wait)

    def load(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        *,
        fresh_optimizer: bool | None = None,
    ) -> LoadReport:
        """Load the latest checkpoint in `weights_path`, or that `iter_*` directory itself, and
        report what was restored. The reference policy is unchanged.

        CheckpointError, on every rank and before anything is changed, for a checkpoint that is
        missing, damaged, of another model or a newer version, or without the optimizer's state;
        the last is allowed with `fresh_optimizer` (by default the configuration's).
        """
        if fresh_optimizer is None:
            fresh_optimizer = self._config.megatron_cfg.checkpoint.fresh_optimizer
        weights, optimizer = _absolute(weights_path), _absolute(optimizer_path)
        assert weights is not None
        purpose = f"load {weights}, its optimizer from {optimizer}, {fresh_optimizer=}"
        loader = Loader(self._saved.table, self._engine.place, self._coordinator, purpose)

        def prepare() -> None:
            self._saver.finish()
            need = SAVE if self._contents.has_optimizer else SEND_WEIGHTS
            self._session.memory.ready("load_checkpoint()", need, repairs=True)

        loader.under.run_together("ready", prepare)
        moments = self._contents.kept_states
        found = loader.find(weights, optimizer, moments=moments, fresh=fresh_optimizer)
        loader.verify(found)
        state = self._session.state
        with loader.open(partial(self._look_up, found)) as (plan, rest):
            state.begin_load(str(found.root))  # unusable until all of it has succeeded
            loader.under.run_together("read", lambda: self._fill(plan))
            report = loader.under.run_together(
                "restored", lambda: self._contents.restore(found, rest)
            )
            state.end_load()
            state.steps = report.step
        loader.under.leave_together()
        if self._session.rank == 0:
            _log.log(logging.WARNING if report.not_restored else logging.INFO, "%s", report)
        return report

    def start_from(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None
    ) -> LoadReport | None:
        """`load` for a policy under construction, closed on failure; None without a path."""
        if weights_path is None:
            return None
        try:
            return self.load(weights_path, optimizer_path)
        except BaseException:
            self._session.close()
            raise

    def finish(self) -> SaveReport | None:
        """Wait for a running save; CheckpointError if it failed. See `Saver.finish`."""
        return self._saver.finish()

    def leave(self) -> None:
        """Finish for good: rank 0 waits for the others, see `Session.leave`."""
        self.finish()
        if self._kept is not None:
            self._kept.close()
        self._session.leave(self._coordinator.lost_a_rank)

    def _look_up(self, found: FoundCheckpoint, files: RawFiles) -> tuple[LoadPlan, NonTensorState]:
        """Look up everything that will be read and set, before anything is changed."""
        self._contents.check_kind(found)
        held = self._contents.held(with_states=found.optimizer is not None)
        plan = LoadPlan(found, files, self._saved.table, self._engine.place, held)
        return plan, self._contents.examine(found, plan)

    def _fill(self, plan: LoadPlan) -> None:
        plan.fill()
        if self._session.state.awaits_weights:
            refuse_unfilled((entry.megatron, parameter) for entry, parameter in self._engine.held)
            self._session.state.fill()


def source_dtypes(
    config: PolicyConfig, weights_path: AnyPath | None, with_reference: bool
) -> dict[str, torch.dtype] | None:
    """The dtypes that the weights had in Hugging Face format, as recorded in the checkpoint that
    all of them come from; None if they come from `config.model_name`, as do what adapters adapt and
    a reference that the configuration does not name. CheckpointError if there is no checkpoint.
    """
    path = _absolute(weights_path)
    read = with_reference and config.reference_model_name is None
    if path is None or read or config.megatron_cfg.peft.enabled:
        return None
    return common_state.source_dtypes(tracker.find(path))


def _refuse_overlap(export: AnyPath, origin: Origin, *saved: Path | None) -> None:
    """ConfigError unless the path is outside what is saved and what the policy was made from, and
    nothing else is at that path.
    """
    target = _absolute(export)
    assert target is not None
    origin.check_apart(target)
    check_replaceable(target, overwrite=True)
    for root in filter(None, saved):
        if target.is_relative_to(root) or root.is_relative_to(target):
            raise ConfigError(
                f"hf_export={target} overlaps checkpoints in {root}: choose a separate directory"
            )


def _refuse_checkpoints(*roots: Path | None) -> None:
    """ConfigError for a path that is a file, or itself a checkpoint: loads would never look into
    it.
    """
    for root in filter(None, roots):
        if root.is_file():
            raise ConfigError(f"{root} is a file: give a directory to save checkpoints in")
        if is_checkpoint(root):
            raise ConfigError(
                f"{root} is a checkpoint itself: give a directory to save checkpoints in"
            )


def _absolute(path: AnyPath | None) -> Path | None:
    return None if path is None else Path(path).expanduser().absolute()
