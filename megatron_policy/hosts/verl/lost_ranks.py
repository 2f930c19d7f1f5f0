"""Explains a collective that fails because another rank is gone: the message of gloo or NCCL has an
address and no reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_policy.errors import WorkerError

_log = logging.getLogger(__name__)

_MESSAGES = (
    *("by peer", "Broken pipe", "caused pair closure", "Timed out waiting"),  # by gloo
    "remote process exited",  # by NCCL
)


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Raise WorkerError for a collective of this context that fails because of another rank.

    The message is logged too, since a driver can end with its own report of the lost rank.
    """
    try:
        yield
    except RuntimeError as error:
        # Errors of NCCL itself share a type with those of this rank's own device.
        in_store = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if not in_store and not any(each in str(error) for each in _MESSAGES):
            raise
        message = (
            f"rank {dist.get_rank()} waited for another rank, which was killed, failed or hung: "
            "its log says why, or that of its node (the kernel's, where memory ran out). "
            f"Start again from the last checkpoint. ({type(error).__name__}: {error})"
        )
        _log.error("%s", message)
        raise WorkerError(message, cause=str(error)) from error
