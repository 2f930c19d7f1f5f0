"""Writers of metrics: JSON lines, TensorBoard and Weights & Biases.

All open what they write to at the first record, so that each rank can make one: only rank 0's is
used.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_policy.config import MetricsConfig
from megatron_policy.errors import ConfigError
from megatron_policy.extras import require
from megatron_policy.interfaces.metrics import MetricsWriter

_TAIL = 1 << 16
"""Bytes that are searched at once for the end of the last complete line."""


class JsonlWriter:
    """One JSON object a line: `step`, `time` in seconds since 1970, and the metrics by name.

    Each line is one write to the end of the file, so a process that is killed loses none of those
    before; half a line that a full disk has left is cut off when the file is opened again. Numbers
    that are not finite are null. A run that is resumed continues the file: of a step that it takes
    again, the later line counts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """ConfigError if `path` is a directory. Its own directory is made if it is missing."""
        self._path = Path(path).expanduser().absolute()
        if self._path.is_dir():
            raise ConfigError(f"metrics.jsonl: {self._path} is a directory; name a file in it")
        self._file: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is None:
            self._file = self._open()
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n"
        left = memoryview(line.encode())
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        end = size = os.fstat(file).st_size
        while end:
            start = max(end - _TAIL, 0)
            at = os.pread(file, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            os.ftruncate(file, end)
        return file


class TensorBoardWriter:
    """Event files of TensorBoard in a directory, a scalar for each metric.

    A run that is resumed adds a file there, and hides what was recorded of the steps that it takes
    again.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """MissingPackageError without the package tensorboard."""
        require("tensorboard")
        self._directory = str(Path(directory).expanduser().absolute())
        self._events: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars to the file."""
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(self._directory, purge_step=step)
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        if self._events is not None:
            self._events.close()
        self._events = None


class WandbWriter:
    """A run of Weights & Biases, with the optimizer step as the axis of all curves.

    Without `name` W&B makes one up. With an `id` a run of that id is continued. `mode` "offline"
    writes to `directory` (by default `wandb/` here), for `wandb sync`.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        id: str | None = None,
        mode: str | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """MissingPackageError without the package wandb."""
        require("wandb")
        self._settings = {
            "project": project,
            "name": name,
            "id": id,
            "resume": None if id is None else "allow",
            "mode": mode,
            "dir": None if directory is None else os.fspath(directory),
        }
        self._run: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one record. W&B's own step, which cannot go back, only counts records."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._settings)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
        self._run = None


def configured_writers(config: MetricsConfig) -> list[MetricsWriter]:
    """The writers that a configuration names; MissingPackageError where one lacks its package."""
    writers: list[MetricsWriter] = []
    if config.jsonl is not None:
        writers.append(JsonlWriter(config.jsonl))
    if config.tensorboard is not None:
        writers.append(TensorBoardWriter(config.tensorboard))
    if config.wandb is not None:
        own = config.wandb
        writers.append(
            WandbWriter(
                own.project, name=own.name, id=own.id, mode=own.mode, directory=own.directory
            )
        )
    return writers
