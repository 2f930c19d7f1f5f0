"""What the ranks that are left say when another one is gone.

A collective of theirs then fails in gloo or NCCL, whose message has an address and no reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_policy.errors import WorkerError

_log = logging.getLogger(__name__)

_OF_GLOO = ("by peer", "Broken pipe", "caused pair closure", "Timed out waiting")


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """WorkerError, also logged, where a collective in this context fails for another rank's sake.

    A driver may report the end of a rank first; the log says what it means in any case.
    """
    try:
        yield
    except RuntimeError as error:
        if not _of_another_rank(error):
            raise
        said = (
            f"rank {dist.get_rank()} waited for another rank, which was killed, failed or hung: "
            "its log says why, or that of its node (the kernel's, where memory ran out). "
            f"Start again from the last checkpoint. ({type(error).__name__}: {error})"
        )
        _log.error("%s", said)
        raise WorkerError(said) from error


def _of_another_rank(error: RuntimeError) -> bool:
    known = isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError)
    return known or any(each in str(error) for each in _OF_GLOO)
