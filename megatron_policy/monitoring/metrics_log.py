"""Hands what a policy has measured to writers, as flat records, and keeps the speed of the last
training calls for reports.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.metrics import MetricsWriter

_log = logging.getLogger(__name__)

KEPT_CALLS = 20
"""Training calls whose speed is kept."""

_OF_THE_STEP = ("lr", "wd", "global_valid_seqs", "global_valid_toks")
"""What each microbatch's metrics repeat of the whole step."""
_MISMATCH = "rollout_mismatch"

Record = dict[str, float]
PerMicrobatch = Mapping[str, Sequence[Any]]


class Transfer(Protocol):
    """What a save or a refit says of itself."""

    @property
    def step(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bytes_per_second(self) -> float: ...


class MetricsLog:
    """The records of one policy, in one process of it.

    A writer that raises is closed and not called again, with one warning: a step that was taken is
    not lost for want of its record.

    Attributes:
        step (int): the optimizer step of the last training call, or of a checkpoint loaded since.
        speeds (deque): what the last `KEPT_CALLS` training calls say of their speed.
        mismatch (Record | None): of the last training call whose data had the log-probabilities of
            rollouts, how far training's were from them.
    """

    def __init__(self, writers: Iterable[MetricsWriter] = ()) -> None:
        self._writers = list(writers)
        self._saved: Transfer | None = None
        self.step = 0
        self.speeds: deque[Record] = deque(maxlen=KEPT_CALLS)
        self.mismatch: Record | None = None

    def trained(
        self, result: Mapping[str, Any], per_microbatch: PerMicrobatch | None, *, eval_mode: bool
    ) -> None:
        """Record a `TrainResult`, with the loss's metrics of all data-parallel ranks' microbatches;
        None in a process that does not write.
        """
        self.step = result["step"]
        if not eval_mode:
            self.speeds.append(dict(result["speed"]))
            self.mismatch = result.get(_MISMATCH, self.mismatch)
        if self._writers and per_microbatch is not None:
            self.write(result["step"], training_record(result, per_microbatch, eval_mode))

    def saved(self, report: Transfer | None) -> None:
        """Record bytes, seconds and rate of a save; one that runs in the background reports None,
        and itself later, which can be more than once.
        """
        if report is not None and report != self._saved:
            self._saved = report
            self._record("checkpoint", report)

    def sent(self, manifest: Transfer) -> None:
        """Record bytes, seconds and rate of a refit."""
        self._record("refit", manifest)

    def _record(self, what: str, transfer: Transfer) -> None:
        names = ("total_bytes", "seconds", "bytes_per_second")
        self.write(transfer.step, {f"{what}/{name}": getattr(transfer, name) for name in names})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one record to all writers."""
        for writer in tuple(self._writers):
            try:
                writer.write(step, metrics)
            except Exception as error:
                self._writers.remove(writer)
                _log.warning(
                    "%s could not write the metrics of step %d and is not used any more, training "
                    "goes on: %r",
                    type(writer).__name__,
                    step,
                    error,
                )
                try:
                    writer.close()
                except Exception as second:
                    _log.debug("nor could it be closed: %r", second)

    def close(self) -> None:
        """Close all writers."""
        for writer in tuple(self._writers):
            try:
                writer.close()
            except Exception as error:
                _log.warning("%s could not be closed: %r", type(writer).__name__, error)


def checked_metrics(metrics: Mapping[str, Any]) -> Record:
    """A caller's own metrics as numbers; ConfigError naming what is not one."""
    found: Record = {}
    for name, value in metrics.items():
        number = _number(value)
        if not isinstance(name, str) or number is None:
            raise ConfigError(
                f"write_metrics(): {name!r} is {value!r:.80}; metrics are numbers by name"
            )
        found[name] = number
    return found


def training_record(
    result: Mapping[str, Any], per_microbatch: PerMicrobatch, eval_mode: bool
) -> Record:
    """A `TrainResult` as one flat record: `train/...` of the step (`eval/...` in `eval_mode`), the
    rollouts' mismatch included, `loss/...` of the loss's own metrics (`eval_loss/...`), `moe/...`,
    `speed/...`.

    The loss is the mean of the call's global batches, as its metrics are; counts are sums.
    """
    kind, of_loss = ("eval", "eval_loss") if eval_mode else ("train", "loss")
    losses = [float(each) for each in result["loss"]]
    found: Record = {
        f"{kind}/loss": sum(losses) / len(losses),
        f"{kind}/valid_sequences": sum(result["valid_sequences"]),
        f"{kind}/valid_tokens": sum(result["valid_tokens"]),
    }
    for name, values in per_microbatch.items():
        number = None if name in _OF_THE_STEP else _join(name, values)
        if number is not None:
            found[f"{of_loss}/{name}"] = number
    found |= {f"{kind}/{name}": float(each) for name, each in result.get(_MISMATCH, {}).items()}
    if eval_mode:
        return found
    found["train/grad_norm"] = float(result["grad_norm"][-1])
    for name in ("lr", "weight_decay", "loss_scale", "skipped_steps"):
        if name in result:
            found[f"train/{name}"] = float(result[name])
    for prefix, numbers in (("moe", result.get("moe_metrics", {})), ("speed", result["speed"])):
        found |= {f"{prefix}/{name}": float(value) for name, value in numbers.items()}
    return found


def merge_microbatches(parts: Iterable[PerMicrobatch]) -> dict[str, list[Any]]:
    """The metrics of all parts' microbatches, by name, one part after another."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items():
            found.setdefault(name, []).extend(values)
    return found


def _join(name: str, values: Sequence[Any]) -> float | None:
    """One number for a call: the parts add up, minima and maxima do not; None without numbers."""
    numbers = [number for number in map(_number, values) if number is not None]
    if not numbers:
        return None
    join: Callable[[Iterable[float]], float] = math.fsum
    if "_min" in name or "_max" in name:
        join = min if "_min" in name else max
    try:
        return join(numbers)
    except (OverflowError, ValueError):  # infinities of both signs
        return math.nan


def _number(value: Any) -> float | None:
    """The value as a number; None if it is not a single one."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
