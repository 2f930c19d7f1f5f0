"""A rank that waits for one that is gone says so; errors of its own stay as they are."""

from __future__ import annotations

import logging
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from megatron_policy.errors import WorkerError
from megatron_policy.hosts.verl.lost_ranks import lost_ranks_named

LIMIT_S = 120


def reduce_twice(rank: int, path: str, told: Connection, how: str) -> None:
    """Rank 1 is killed before the second sum, or does not come to it; rank 0 tells what it gets."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=LIMIT_S if how == "killed" else 5)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    one = torch.ones(1)
    dist.all_reduce(one)
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        signal.pause()
    try:
        with lost_ranks_named():
            dist.all_reduce(one)
    except WorkerError as error:
        told.send((str(error), error.cause, repr(error.__cause__)))
    else:
        told.send(("nothing was raised", "", ""))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_rank_that_waits_for_another_that_is_gone_says_so(how: str, tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe(duplex=False)
    arguments = (str(tmp_path / "store"), there, how)
    ranks = [spawned.Process(target=reduce_twice, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert here.poll(LIMIT_S), "rank 0 still waits"
        said, cause, raised = here.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert said.startswith("rank 0 waited for another rank, which was killed, failed or hung: ")
    assert cause and cause in said and "Error" in raised


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.OutOfMemoryError("CUDA out of memory"),
        dist.DistBackendError("NCCL error: unhandled cuda error"),
        ValueError("Connection closed by peer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_ranks_own_stays_as_it_is(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(type(error)) as found, lost_ranks_named():
        raise error
    assert found.value is error and not caplog.records
