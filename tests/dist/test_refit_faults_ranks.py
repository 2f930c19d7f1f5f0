"""A training rank or an engine that fails during a refit of several ranks: all others hear of it in
time, and the next refit works.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.collective.transport import Collective
from tests import collective_engine, refit_engine
from tests.collective_engine import SECRET
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import LAYOUTS
from tests.dist.resuming import replaced
from tests.dist.test_export import tensors_of
from tests.dist.test_refit_faults_collective import IN_TIME_S, alive, engines
from tests.other_process import OtherProcess
from tests.ranks import RankPool
from tests.refit_engine import bits

__all__ = ["engines"]

BUCKET = 8192
TIMEOUT_S, STALL_S = 3.0, 7.5
GROUPS = pytest.mark.parametrize(("name", "by_stage"), [("TP2", False), ("PP2", True)])


def stopped_amid(stream: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The exporter's tensors, of which the fifth comes after this process was stopped a while."""

    def call(*args: Any) -> Iterator[Any]:
        for number, each in enumerate(stream(*args)):
            if number == 4:
                subprocess.Popen(["sh", "-c", f"sleep {STALL_S}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            yield each

    return call


def refit_despite(
    config: dict[str, Any], port: int, world: int, train: int | None, stalls: bool
) -> tuple[str, float]:
    """What this rank hears of a refit that fails, because rank 1 stalls or for another reason, and
    after how long; the refit after that one works.
    """
    unused = {"init_optimizer": False, "init_reference_model": False}
    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **unused) as policy:
        group = Collective.join(
            policy.exporter, "127.0.0.1", port, world, train, timeout_s=TIMEOUT_S, secret=SECRET
        )
        if stalls:
            policy.refit(group.transport(BUCKET))
        culprit = stalls and policy.rank == 1
        started = time.monotonic()
        with (
            replaced(type(policy.exporter), "stream", stopped_amid if culprit else lambda own: own),
            pytest.raises(RefitError) as error,
        ):
            policy.refit(group.transport(BUCKET))
        seconds = time.monotonic() - started
        if stalls:
            time.sleep(max(0.0, STALL_S + 1 - seconds))  # as long as the other one is away
        policy.refit(group.transport(BUCKET))
        group.close()
        return str(error.value), seconds


def joined(engine: OtherProcess, path: Path, port: int, by_stage: bool, **options: Any) -> Any:
    """That engine in a group with both ranks, or with the first; what ranks are told of it."""
    forms = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}
    train, trainers = (2, 2) if by_stage else (None, 1)
    die_at = options.pop("die_at", 0)
    engine.call(refit_engine.start, forms, die_at, {"timeout_s": TIMEOUT_S, **options})
    engine.call(collective_engine.join, port, trainers, trainers + 1, train, TIMEOUT_S)
    return port, trainers + 1, train


@pytest.mark.nightly
@GROUPS
def test_a_training_rank_that_stalls_fails_the_others_and_the_engine_in_time(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], name: str, by_stage: bool
) -> None:
    path, engine = checkpoint("qwen2", tied=True, vocab=251), alive(engines, 0)
    with reserved_port() as port:
        group = joined(engine, path, port, by_stage)
        engine.begin(collective_engine.receive_until, 2, 60.0)
        config = policy_config(path, LAYOUTS[name].megatron)
        (message, _), _ = ranks.run(2, refit_despite, config, *group, True)
        engine.result()
    assert message
    assert engine.call(refit_engine.state)[:3] == (bits(tensors_of(path)), 0, False)


@GROUPS
def test_an_engine_killed_amid_the_chunks_fails_all_ranks_and_another_takes_its_place(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], name: str, by_stage: bool
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    with reserved_port() as port, ThreadPoolExecutor() as pool:
        for number, die_at in enumerate((4, 0)):
            engine = alive(engines, number)
            group = joined(engine, path, port, by_stage, die_at=die_at, staged=False)
        engines[0].begin(collective_engine.receive_until, 1, 60.0)
        config = policy_config(path, LAYOUTS[name].megatron)
        heard = pool.submit(ranks.run, 2, refit_despite, config, *group, False)
        with pytest.raises((EOFError, OSError)):
            engines[0].result()
        engines[1].begin(collective_engine.receive_until, 1, 60.0)
        for message, seconds in heard.result(60):
            assert message and seconds < IN_TIME_S
        engines[1].result()
    assert engines[1].call(refit_engine.state)[:3] == (bits(tensors_of(path)), 0, False)
