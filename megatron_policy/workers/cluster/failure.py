"""Turns Ray's reports of failed workers into this package's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import RayActorError, RayTaskError

from megatron_policy import errors
from megatron_policy.errors import WorkerError

# Errors that leave the worker as it was before the call.
REFUSALS = (
    errors.BatchError,
    errors.CheckpointError,
    errors.ConfigError,
    errors.ConversionError,
    errors.ExportError,
    errors.RefitError,
    errors.TransitionError,
    NotImplementedError,
)
OWN = (*REFUSALS, WorkerError)
_OWN_NAMES = {kind.__name__: kind for kind in OWN if kind.__module__ == errors.__name__}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(rf"^{re.escape(errors.__name__)}\.(\w+): ", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """One rank's failure: `text` is the worker's own traceback or Ray's report of its death.

    `lost` says what happened to a worker that the driver has given up and treats as dead.
    """

    rank: int
    text: str
    exception: BaseException | None
    died: bool
    lost: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Parse what `ray.get` raised for this rank's call."""
        text = clean_report(str(error))
        if isinstance(error, RayTaskError):
            return cls(rank, text, error.cause, died=False)
        if getattr(error, "actor_init_failed", False):
            # The process of a failed constructor is gone; its exception is left as text only.
            return cls(rank, text, find_own_error(text), died=False)
        died = isinstance(error, RayActorError)
        return cls(rank, text, None if died else error, died)

    @classmethod
    def loss(cls, rank: int, lost: str, text: str) -> Failure:
        """The failure of a worker that no longer answers and whose death was not reported."""
        return cls(rank, text, None, died=True, lost=lost)

    @property
    def refused(self) -> bool:
        """Whether the rank only refused the call."""
        return isinstance(self.exception, REFUSALS)

    def headline(self) -> str:
        """What happened, in one line."""
        if self.died:
            return f"rank {self.rank} {self.lost or 'died'}"
        lines = [line for line in self.text.splitlines() if line.strip()]
        what = (lines or ["unknown error"])[-1]
        if self.exception:
            first = (str(self.exception).splitlines() or [""])[0]
            what = f"{type(self.exception).__name__}: {first}"
        return f"rank {self.rank} raised {what}"


def find_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to blame: a lost or dead worker, since it breaks the others' connections, else
    the earliest.
    """
    return min(failures, key=lambda failure: (not failure.lost, not failure.died))


def make_error(call: str, failures: Sequence[Failure], running: Sequence[int]) -> Exception:
    """The exception to raise for a failed call, with its `__cause__` set.

    An error of this package's own types is returned as itself, caused by a WorkerError with rank
    and traceback; any other becomes a WorkerError caused by the worker's exception.
    """
    blamed = find_cause(failures)
    others = [failure.headline() for failure in failures if failure is not blamed]
    if running:
        others.append(f"rank(s) {', '.join(map(str, running))} had not finished")
    rest = f"\nMeanwhile: {'; '.join(others)}." if others else ""
    worker_error = WorkerError(
        f"{call}: {blamed.headline()}\n{blamed.text}{rest}", rank=blamed.rank, cause=blamed.text
    )
    if isinstance(blamed.exception, OWN):
        blamed.exception.__cause__ = worker_error
        return blamed.exception
    worker_error.__cause__ = blamed.exception
    return worker_error


def is_refusal(
    failures: Sequence[Failure], running: Sequence[int], replicas: Sequence[int]
) -> bool:
    """Whether every rank is ready for the next call: all have finished, and in each replica, whose
    number is given for each rank, either all or none refused, so that no message between them is
    left pending.
    """
    refused = {failure.rank for failure in failures if failure.refused}
    answers = {(replica, rank in refused) for rank, replica in enumerate(replicas)}
    return not running and len(refused) == len(failures) and len(answers) == len(set(replicas))


def clean_report(report: str) -> str:
    """The report without terminal colours and the marks of frames that Ray cut out."""
    lines = _COLOUR.sub("", report).strip().splitlines()
    kept, after_source = [], False
    for line in lines:
        marks = not line.strip(" ^~")
        if not marks or after_source:
            kept.append(line)
        after_source = not marks and line.startswith("    ")
    return "\n".join(kept)


def find_own_error(text: str) -> BaseException | None:
    """This package's error at the end of the traceback, if there is one."""
    for found in reversed(list(_RAISED.finditer(text))):
        message, kind = text[found.end() :], _OWN_NAMES.get(found[1])
        ends_here = "\nTraceback (most recent call last):" not in message
        return kind(message.strip()) if kind and ends_here else None
    return None
