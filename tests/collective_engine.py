"""An engine of `refit_engine` in a group with trainers: what its process is sent."""

from __future__ import annotations

import os
import time
from typing import Any

from megatron_policy.errors import RefitError
from megatron_policy.refit.receive.collective import join_collective
from tests import refit_engine

SECRET = "of the groups in these tests"

_group: list[Any] = []


def join(
    port: int,
    rank: int,
    world: int,
    train: int | None,
    timeout_s: float,
    secret: str = SECRET,
) -> None:
    """Be that rank of the group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a container need not resolve
    leave()
    _group[:] = [join_collective("127.0.0.1", port, rank, world, train, timeout_s, secret=secret)]


def receive() -> int:
    """One refit; the step."""
    receiver = refit_engine._here["receiver"]
    return receiver.receive_collective(_group[0]).step


def receive_each(count: int) -> list[tuple[int, refit_engine.Bits]]:
    """So many refits: the step and the weights after each."""
    return [(receive(), refit_engine.state()[0]) for _ in range(count)]


def receive_until(count: int, limit_s: float) -> list[str]:
    """Refits until so many have succeeded; what was heard of those that did not."""
    heard: list[str] = []
    deadline = time.monotonic() + limit_s
    while count and time.monotonic() < deadline:
        try:
            receive()
            count -= 1
        except RefitError as error:
            heard.append(str(error))
    assert not count, heard
    return heard


def leave() -> None:
    """Leave the group, if this process is in one."""
    while _group:
        _group.pop().close()
