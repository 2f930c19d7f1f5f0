"""Saves a checkpoint from each rank's local shards to a directory that appears complete or not at
all, blocking or in the background of training.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.checkpoint.kept_files import KeptFiles
from megatron_policy.checkpoint.local_shards import WriteItem
from megatron_policy.checkpoint.manifest import CheckpointManifest
from megatron_policy.checkpoint.report import SaveReport
from megatron_policy.checkpoint.writing import Ready, Staging, merge, stage_in_turn, write_records
from megatron_policy.converters.files.publishing import (
    clean_leftovers,
    new_directories,
    write_file,
)
from megatron_policy.converters.formats.dist_writing import small_files
from megatron_policy.converters.table import Table
from megatron_policy.coordination.operation import SAVES, Coordinator, Operation
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.digests import digest_bytes
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.parallel.topology import Topology

_log = logging.getLogger(__name__)

SIDE = "hf"
"""Directory in a checkpoint for config and tokenizer, where the converter looks for them."""


@dataclass(frozen=True)
class SavedModel:
    """The model that is saved."""

    table: Table
    topology: Topology
    kept: KeptFiles | None
    """What rank 0 writes besides the tensors; None on other ranks."""
    described: Mapping[str, bytes]
    """Files that say what adapters are, by name, if there are any."""


@dataclass(frozen=True)
class DirectoryContents:
    """This rank's part of one directory of a save."""

    root: Path
    """The absolute path in which the directory of the step is made."""
    contains: tuple[str, ...]
    items: Sequence[WriteItem]
    objects: Mapping[str, bytes]
    common: Mapping[str, Any]
    """The common state as plain values; rank 0 writes it."""
    optimizer_elsewhere: bool = False


@dataclass(frozen=True)
class _Job:
    """A running save on this rank; its parts are published in order."""

    under: Operation
    step: int
    parts: tuple[DirectoryContents, ...]
    ready: tuple[Iterable[Ready], ...]
    began: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Saver:
    """One rank's end of every save; at most one runs at a time."""

    def __init__(self, model: SavedModel, coordinator: Coordinator) -> None:
        self._model, self._coordinator = model, coordinator
        self._pool = PinnedMemoryPool()
        self._reserving: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._copies: tuple[Staging, ...] = ()
        self._failure: Exception | None = None
        self._report: SaveReport | None = None

    def save(
        self,
        purpose: str,
        step: int,
        check: Callable[[], object],
        parts: Callable[[], Sequence[DirectoryContents]],
        *,
        wait: bool,
    ) -> SaveReport | None:
        """Write what `parts` returns; the last part makes the checkpoint the one to load.

        Collective, with the same `purpose` on all ranks. `check` refuses an impossible save;
        `parts`, which may be collective, runs only if no rank has refused. Without `wait` it
        returns None while everything is being copied to host memory, which is kept for the next
        save: until `copied` returns, no write item may change or move. CheckpointError if this save
        fails, or an earlier one whose failure was not reported yet; nothing of the failed save is
        left, and earlier checkpoints are unchanged.
        """
        began = time.perf_counter()
        under = self._coordinator.begin(purpose)
        under.run_together("checked", lambda: (self.finish(), check()))
        job = under.run_together(
            "ready", lambda: self._job(under, step, tuple(parts()), wait, began)
        )
        if wait:
            return self._carry_out(job)
        self._thread = threading.Thread(
            target=self._in_background, args=(job,), name="checkpoint-writer"
        )
        self._thread.start()
        return None

    def copied(self) -> None:
        """Wait until the running save has copied what it writes, or has failed to."""
        for each in self._copies:
            each.wait()
        # Only now: if the wait is interrupted, the next step still has to wait.
        self._copies = ()

    def finish(self) -> SaveReport | None:
        """Wait for the running save; CheckpointError if it has failed. Returns the report of the
        last one in the background; None before the first.
        """
        self.copied()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                "the save in progress failed; the previous checkpoint is still the latest: "
                f"{failure}"
            ) from failure
        return self._report

    def _job(
        self,
        under: Operation,
        step: int,
        parts: tuple[DirectoryContents, ...],
        wait: bool,
        began: float,
    ) -> _Job:
        if wait:
            ready = tuple(stage_in_turn(part.items, self._host_memory) for part in parts)
            return _Job(under, step, parts, ready, began)
        pool = self._host_memory()
        pool.reset()
        for part in parts:
            self._copies += (Staging(part.items, pool),)
        rest = tuple(replace(part, items=()) for part in parts)
        return _Job(under, step, rest, self._copies, began)

    def reserve(self, nbytes: int) -> None:
        """Allocate the host memory for background saves now, in a thread; otherwise the first save
        would have to wait for it.
        """

        def touch() -> None:
            for piece in self._pool.take(nbytes):
                piece.zero_()  # the system allocates pages when they are touched
            self._pool.reset()

        self._reserving = threading.Thread(target=touch, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def _host_memory(self) -> PinnedMemoryPool:
        if self._reserving is not None:
            self._reserving.join()
        return self._pool

    def _in_background(self, job: _Job) -> None:
        self._report = None
        try:
            self._report = self._carry_out(job)
        except Exception as error:
            self._failure = SAVES.wrap(error)
            # Logged too, as the process may end before anyone asks.
            _log.error("the save of step %d in the background has failed: %s", job.step, error)

    def _carry_out(self, job: _Job) -> SaveReport:
        if self._coordinator.rank == 0:
            total = self._lead(job)
        else:
            self._write(job, [Path(path) for path in json.loads(job.under.wait_for("where"))])
            total = int(job.under.wait_for("published"))
        job.under.leave_together()
        return SaveReport(job.step, total, time.perf_counter() - job.began)

    def _lead(self, job: _Job) -> int:
        """Rank 0's part; returns the bytes that all ranks have written."""
        with ExitStack() as held:
            with job.under.critical_section():
                roots = [part.root for part in job.parts]
                tracker.reunite(roots[-1], roots[0])
                for root in roots:  # keep what is complete until this save is
                    clean_leftovers(root, unless=manifest.NAME)
                names = [tracker.directory(root, job.step) for root in roots]
                partials = held.enter_context(new_directories(names, overwrite=True))
                job.under.publish("where", json.dumps([str(path) for path in partials]))
            self._write(job, partials)
            with job.under.critical_section():
                pairs = zip(job.parts, partials, strict=True)
                total = sum(self._complete(job, part, partial) for part, partial in pairs)
                held.close()
                before = tracker.read_step(roots[-1])
                for root in roots:
                    tracker.commit(root, job.step)
                if before is not None and before > job.step:
                    _log.warning(
                        "%s: step %d is the one to load now, where step %d was, which stays; load "
                        "that by its own path",
                        roots[-1],
                        job.step,
                        before,
                    )
                for root in roots:
                    clean_leftovers(root)
        job.under.publish("published", str(total))
        return total

    def _write(self, job: _Job, partials: Sequence[Path]) -> None:
        def write() -> None:
            for part, ready, partial in zip(job.parts, job.ready, partials, strict=True):
                write_records(partial, self._coordinator.rank, ready, part.objects)

        job.under.run_together("written", write)

    def _complete(self, job: _Job, part: DirectoryContents, partial: Path) -> int:
        """Rank 0's final work: write everything besides the records. Returns the bytes of all."""
        merged = merge(partial, self._coordinator.size)
        contents = small_files(merged.layout, dict(part.common))
        for name, content in contents.items():
            write_file(partial / name, content)
        files, of_model = {name: digest_bytes(content) for name, content in contents.items()}, 0
        table, kept, described = self._model.table, self._model.kept, self._model.described
        if manifest.WEIGHTS in part.contains:
            assert kept is not None, "rank 0 writes them"
            side = kept.write(partial / SIDE)
            for name, content in described.items():
                write_file(partial / SIDE / name, content)
                side[name] = digest_bytes(content)
            files |= {f"{SIDE}/{name}": digest for name, digest in side.items()}
            of_model = kept.nbytes + sum(map(len, described.values()))
        stated = CheckpointManifest(
            id=job.id,
            step=job.step,
            contains=part.contains,
            optimizer_elsewhere=part.optimizer_elsewhere,
            **manifest.identify(table, self._model.topology),
            tensors=merged.tensors,
            records=merged.records,
            files=files,
            overrides=table.overrides,
        )
        content = stated.encode()
        write_file(partial / manifest.NAME, content)
        records = sum(each.length for ranges in merged.records.values() for each in ranges)
        return records + sum(map(len, contents.values())) + of_model + len(content)
