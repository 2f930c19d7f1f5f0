"""The errors that users can see; they can be pickled."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot be run; the message names key, value and legal values."""


class MissingPackageError(ImportError):
    """An optional package that the call needs is not installed; the message has the pip command."""


class BatchError(ValueError):
    """A call's data, arguments or metrics do not fit; the step they belong to is not taken."""


class LossError(BatchError):
    """A loss cannot be trained on, or has led to gradients that cannot: it raised, broke the
    contract with its return value, or is not finite.

    Raised on every rank. No weight has changed, nor have optimizer, schedule and random state; a
    step that is trained in parts can only be aborted.
    """


class ConversionError(ValueError):
    """A checkpoint and the table of its model family disagree; the message lists both sides."""


class ExportError(RuntimeError):
    """An export could not be written; the message names the rank and what failed.

    Raised on every rank; the policy is intact and nothing was published.
    """


class CheckpointError(RuntimeError):
    """A training checkpoint cannot be written or read back."""


class RefitError(RuntimeError):
    """Weights could not be handed to an inference engine."""


class TransitionError(RuntimeError):
    """Memory could not be moved between device and host, on this rank or another.

    The message says what stopped it and which state is left; repeating the call continues from
    there.
    """


class WorkerError(RuntimeError):
    """A rank failed or died.

    `rank` is the global rank that failed (None if no single rank can be named) and `cause` is its
    own error text, including the traceback.
    """

    def __init__(self, message: str, rank: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
