"""A training rank or an engine that fails during a refit of several ranks: all others hear of it in
time, and the next refit works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.transports.collective.transport import Collective, CollectiveTransport
from tests import collective_engine, refit_engine
from tests.collective_engine import SECRET
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import LAYOUTS
from tests.dist.test_export import tensors_of
from tests.other_process import OtherProcess
from tests.ranks import RankPool
from tests.refit_engine import bits

BUCKET = 8192


@pytest.fixture(scope="module")
def engines() -> Iterator[list[OtherProcess]]:
    started = [OtherProcess(), OtherProcess()]
    yield started
    for process in started:
        process.kill()


def alive(engines: list[OtherProcess], number: int) -> OtherProcess:
    """That process, or another where a test has ended it or left it during a call."""
    with contextlib.suppress(OSError, EOFError, RefitError):
        if engines[number].call(os.getpid) == engines[number].pid:
            return engines[number]
    engines[number].kill()
    engines[number] = OtherProcess()
    return engines[number]


class Stalling:
    """A transport on a rank that is stopped before it places a tensor, for a while."""

    def __init__(self, inner: CollectiveTransport, at: int, seconds: float) -> None:
        self._inner, self._left, self._seconds = inner, at, seconds
        self._session: Any = None

    def plan(self, exporter: Any) -> Any:
        return self._inner.plan(exporter)

    def open(self, exporter: Any, plan: Any) -> Stalling:
        self._session = self._inner.open(exporter, plan)
        return self

    def place(self, tensor: RefitTensor) -> Any:
        self._left -= 1
        if self._left == 0:
            wake = f"sleep {self._seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._session and self._session.place(tensor)

    def filled(self, tensor: RefitTensor, target: Any) -> None:
        self._session.filled(tensor, target)

    def finish(self, manifest: RefitManifest) -> None:
        if self._session:
            self._session.finish(manifest)

    def close(self) -> None:
        if self._session:
            self._session.close()


TIMEOUT_S, STALL_S = 3.0, 7.5


def refit_with_a_stall(
    config: dict[str, Any], port: int, world: int, train: int | None, culprit: int
) -> tuple[str, float, int]:
    """What this rank hears, after how long, and the step of the refit that follows."""
    unused = {"init_optimizer": False, "init_reference_model": False}
    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **unused) as policy:
        group = Collective.join(
            policy.exporter,
            "127.0.0.1",
            port,
            world,
            train,
            timeout_s=TIMEOUT_S,
            secret=SECRET,
        )
        transport: Any = group.transport(BUCKET)
        policy.refit(transport)
        stalling = Stalling(transport, 5, STALL_S) if policy.rank == culprit else transport
        started = time.monotonic()
        with pytest.raises(RefitError) as error:
            policy.refit(stalling)
        seconds = time.monotonic() - started
        time.sleep(max(0.0, STALL_S + 1 - seconds))  # as long as the other one is away
        after = policy.refit(transport).step
        group.close()
        return str(error.value), seconds, after


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "by_stage"), [("TP2", False), ("PP2", True)])
def test_a_training_rank_that_stalls_fails_the_others_and_the_engine_in_time(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], name: str, by_stage: bool
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    expected = tensors_of(path)
    train = 2 if by_stage else None
    trainers = train or 1
    engine = alive(engines, 0)
    forms = {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
    engine.call(refit_engine.start, forms, 0, {"timeout_s": TIMEOUT_S})
    with reserved_port() as port:
        engine.call(collective_engine.join, port, trainers, trainers + 1, train, TIMEOUT_S)
        engine.begin(collective_engine.receive_until, 2, 60.0)
        config = policy_config(path, LAYOUTS[name].megatron)
        heard = ranks.run(2, refit_with_a_stall, config, port, trainers + 1, train, 1)
        engine.result()
    message, *_ = heard[0]
    assert message
    assert engine.call(refit_engine.state)[:3] == (bits(expected), 0, False)


def refit_with_an_engine_that_dies(
    config: dict[str, Any], port: int, world: int, train: int | None
) -> tuple[str, float]:
    """What this rank hears, and after how long; the refit after that one works."""
    unused = {"init_optimizer": False, "init_reference_model": False}
    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **unused) as policy:
        group = Collective.join(
            policy.exporter,
            "127.0.0.1",
            port,
            world,
            train,
            timeout_s=TIMEOUT_S,
            secret=SECRET,
        )
        started = time.monotonic()
        with pytest.raises(RefitError) as error:
            policy.refit(group.transport(BUCKET))
        seconds = time.monotonic() - started
        policy.refit(group.transport(BUCKET))
        group.close()
        return str(error.value), seconds


@pytest.mark.parametrize(("name", "by_stage"), [("TP2", False), ("PP2", True)])
def test_an_engine_killed_amid_the_chunks_fails_all_ranks_and_another_takes_its_place(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], name: str, by_stage: bool
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    expected = tensors_of(path)
    train = 2 if by_stage else None
    trainers = train or 1
    forms = {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
    options = {"timeout_s": TIMEOUT_S, "staged": False}
    with reserved_port() as port, ThreadPoolExecutor() as pool:
        for number, die_at in enumerate((4, 0)):
            engine = alive(engines, number)
            engine.call(refit_engine.start, forms, die_at, options)
            engine.call(collective_engine.join, port, trainers, trainers + 1, train, TIMEOUT_S)
        engines[0].begin(collective_engine.receive_until, 1, 60.0)
        config = policy_config(path, LAYOUTS[name].megatron)
        heard = pool.submit(
            ranks.run, 2, refit_with_an_engine_that_dies, config, port, trainers + 1, train
        )
        with pytest.raises((EOFError, OSError)):
            engines[0].result()
        engines[1].begin(collective_engine.receive_until, 1, 60.0)
        for message, seconds in heard.result(60):
            assert message and seconds < 90, "no measurement: nobody waits without end"
        engines[1].result()
    assert engines[1].call(refit_engine.state)[:3] == (bits(expected), 0, False)
