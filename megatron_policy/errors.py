"""The errors a user can meet; they survive pickling and know nothing of where they are raised."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot be run; the message names key, value and legal values."""


class BatchError(ValueError):
    """A call's data, arguments or metrics do not fit; the step they belong to is not taken."""


class LossError(BatchError):
    """A loss cannot be trained on, or has led to gradients that cannot: it raised, returned what
    breaks the contract, or is not finite.

    Raised on every rank. No weight has changed, and neither have optimizer, schedule and random
    numbers; a step that is trained in parts can only be aborted.
    """


class ConversionError(ValueError):
    """A checkpoint and the table of its model family disagree; the message lists both sides."""


class ExportError(RuntimeError):
    """An export could not be written; the message names the rank and what failed.

    Raised on every rank; the policy is unharmed and nothing was published.
    """


class CheckpointError(RuntimeError):
    """A training checkpoint cannot be written or read back."""


class RefitError(RuntimeError):
    """Weights could not be handed to an inference engine."""


class TransitionError(RuntimeError):
    """Memory could not be moved between device and host, on this rank or another.

    The message says what stopped it and which state is left; the same call, repeated, goes on from
    there.
    """


class WorkerError(RuntimeError):
    """A rank failed or died.

    `rank` is the global rank that failed (None when no single rank can be named) and `cause` its
    own error text, traceback included.
    """

    def __init__(self, message: str, rank: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
