"""Refits from shards to shards by movers, which write into the engine ranks' memory: the same bits
as over process groups, and the same when something fails. NIXL's run where it is installed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.refit.receive.assembler import ShardAssembler, WeightAssembler
from megatron_policy.refit.receive.collective import CollectiveGroup
from megatron_policy.refit.transports.movers.landing import Landing
from megatron_policy.refit.transports.movers.named import MOVERS
from tests.dist.cases import policy_config
from tests.dist.refits import TP2
from tests.dist.test_delta_refit import BUCKET
from tests.dist.test_detached_refit import SIZES
from tests.dist.test_shard_refit import ENGINES, FAULTS, engines, run, run_changes
from tests.dist.test_shard_refit_deaths import TIMEOUT_S, Phase, Ranks
from tests.other_process import OtherProcess
from tests.ranks import RankPool

__all__ = ["engines"]

OF_HOST, NIXL = "shared_memory", "nixl"
NEEDS_NIXL = pytest.mark.skipif(find_spec(NIXL) is None, reason="NIXL is not installed")
EVERY_DAY = {(OF_HOST, "ep2 tp2 to ep2"), (NIXL, "tp2 to tp2")}


def case(mover: str, *name: str) -> Any:
    """A mover, and a case or a fault; the cheapest that show most are tested every day."""
    daily = not name or name[0] in FAULTS or (mover, *name) in EVERY_DAY
    marks = [pytest.mark.daily if daily else pytest.mark.nightly]
    return pytest.param(mover, *name, marks=marks + [NEEDS_NIXL] * (mover == NIXL))


@pytest.mark.parametrize(
    ("mover", "name"), [case(mover, name) for mover in (OF_HOST, NIXL) for name in ENGINES]
)
def test_movers_bring_each_engine_rank_its_own_elements(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], mover: str, name: str
) -> None:
    run(ranks, engines, checkpoint(ENGINES[name][0], **SIZES), name, mover=mover)


@pytest.mark.parametrize(
    ("mover", "name"), [case(mover, name) for mover in (OF_HOST, NIXL) for name in ENGINES]
)
def test_movers_bring_each_engine_rank_what_has_changed(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], mover: str, name: str
) -> None:
    run_changes(ranks, checkpoint, engines, name, mover)


@pytest.mark.parametrize(
    ("mover", "fault"), [case(mover, fault) for mover in (OF_HOST, NIXL) for fault in FAULTS]
)
def test_what_fails_by_a_mover_fails_on_all_and_the_next_refit_works(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], mover: str, fault: str
) -> None:
    run(ranks, engines, checkpoint("qwen2", **SIZES), "tp2 to tp2", fault, mover)


OF_ENGINES: dict[str, Phase] = {
    "reading the offer": (WeightAssembler, "announce", 1),
    "having memory": (Landing, "prepare", 1),
    "waiting": (CollectiveGroup, "_wait_for_sender", 1),
    "reading": (Landing, "part", 2),
    "loading": (ShardAssembler, "finish", 1),
}


def make_write_phase(mover: str) -> Phase:
    return MOVERS[mover], "write", 2


@contextmanager
def start_ranks(checkpoint: Any, mover: str, timeout_s: float) -> Iterator[Ranks]:
    """Two trainers and two engine ranks, which have met once."""
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": timeout_s}
    config = policy_config(checkpoint("qwen2", **SIZES), TP2, **top)
    with reserved_port() as port, ExitStack() as stack:
        made = Ranks(config, port, mover, timeout_s)
        stack.callback(made.end)
        made.refit()
        yield made


@pytest.mark.parametrize("mover", [case(OF_HOST), case(NIXL)])
def test_an_engine_rank_is_killed_beside_movers(checkpoint: Any, mover: str) -> None:
    with start_ranks(checkpoint, mover, TIMEOUT_S) as ranks:
        for number, phase in enumerate(OF_ENGINES.values()):
            ranks.kill_engine(number % 2, phase)
            ranks.refit()


@pytest.mark.parametrize("mover", [case(OF_HOST), case(NIXL)])
def test_a_trainer_is_killed_while_its_mover_writes(checkpoint: Any, mover: str) -> None:
    with start_ranks(checkpoint, mover, TIMEOUT_S) as ranks:
        ranks.kill_trainer(1, make_write_phase(mover))
        ranks.refit()


def stop_in(phase: Phase, mark: Path) -> None:
    """Be stopped there; when it goes on and is done with that call, there is a file `mark`."""
    holder, name, number = phase
    call, calls = getattr(holder, name), iter(range(1, number + 1))

    def stop(*args: Any) -> Any:
        if next(calls, 0) != number:
            return call(*args)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            return call(*args).wait()
        finally:
            mark.touch()

    setattr(holder, name, stop)


def let_go_on(pid: int, mark: Path) -> None:
    """Before this engine rank reads, let that process go on until there is `mark`."""
    read = Landing.part

    def part(*args: Any) -> Any:
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + TIMEOUT_S
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return read(*args)

    Landing.part = part  # type: ignore[method-assign]


@pytest.mark.nightly
@pytest.mark.parametrize("mover", [OF_HOST, pytest.param(NIXL, marks=NEEDS_NIXL)])
def test_what_a_stopped_trainer_writes_later_reaches_nobody(
    checkpoint: Any, tmp_path: Path, mover: str
) -> None:
    with start_ranks(checkpoint, mover, timeout_s=20.0) as ranks, ExitStack() as stack:
        mark = tmp_path / "mark"
        first, stopped = ranks.trainers
        stack.callback(stopped.kill)
        stopped.call(stop_in, make_write_phase(mover), mark)
        ranks.begin()
        for engine in ranks.engines:
            assert "within" in engine.result()
        assert isinstance(first.result(), str)
        first.kill()
        ranks.trainers = ranks.start_trainers()
        ranks.engines[0].call(let_go_on, stopped.pid, mark)
        ranks.refit()
        ranks.refit()
