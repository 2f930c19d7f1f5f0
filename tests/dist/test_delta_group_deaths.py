"""Trainers and engine ranks that are killed at random moments of refits of what has changed, over a
group and from shards to shards: an engine rank has what some refit has sent, never a mixture, and
the next refit works.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaShards, DeltaStream
from tests import collective_engine, refit_engine
from tests.collective_engine import SECRET
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import TP2
from tests.dist.test_delta_deaths import (
    END,
    FEW_CALLS,
    KILLS,
    MOST_CALLS,
    MOST_REFITS,
    OURS,
    SCAN_AND_PACK,
    TAKE,
    TIMEOUT_S,
    change,
    die_after,
    refuse_to_load,
    release,
)
from tests.dist.test_delta_refit import BUCKET
from tests.dist.test_detached_refit import SIZES
from tests.dist.test_shard_refit import held_by, shards_of
from tests.dist.test_trainer_deaths import _here, start_trainers
from tests.other_process import OtherProcess, read_results
from tests.refit_engine import Bits, bits

BOTH = range(2)
JOIN = ("CollectiveGroup._answer", "WeightAssembler.announce", "CollectiveGroup._join")
PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "group": {
        "trainer": (
            *SCAN_AND_PACK,
            *("CollectiveTransport.ask", "Sender.ask", "_join_streams", "CollectiveTransport.open"),
            *("Sender.offer", "Sender.meet", "CollectiveSession.filled", "Sender.finish"),
            *END,
        ),
        "engine": (
            *JOIN,
            *("CollectiveGroup._take", "WeightAssembler.take", "WeightAssembler.stage", *TAKE),
        ),
    },
    "shards": {
        "trainer": (
            *SCAN_AND_PACK,
            *("ShardRefits.ask", "Sender.ask", "ShardRefits.deliver_changes"),
            *("Sender.offer_shards", "Sender.meet", "_send_runs", "Writer.filled", "Sender.finish"),
            *END,
        ),
        "engine": (
            *JOIN,
            *("ShardAssembler.put", "ShardAssembler.check", "CollectiveGroup._wait_for_engines"),
            *("ShardAssembler.finish", *TAKE),
        ),
    },
}
"""By how engine ranks are reached and by who is killed: functions, in the order of a refit."""
OF_RANK_0 = {
    "group": ("Sender.", "CollectiveSession."),
    "shards": ("Sender.ask", "Sender.offer_shards"),
}
"""What is in the names of functions that rank 0 alone calls."""
PREPARED = {"Patches.undo": refuse_to_load, "ShardAssembler.put": release}
"""What else to do before an engine rank is killed in one of these functions."""
_armed: list[tuple[str, int]] = []
_received = threading.Semaphore(0)


def open_trainer(variables: dict[str, str], config: dict[str, Any], way: str, port: int) -> None:
    os.environ.update(variables)
    opened = ExitStack()
    policy = opened.enter_context(open_policy(config, **UNUSED))
    held, shards = held_by(policy, Topology(tp=2)), way == "shards"
    sizes = (len(BOTH) + 2, 2) if shards else (len(BOTH) + 1, None)
    own = {"secret": SECRET, "of_shards": shards}
    group = Collective.join(policy.exporter, "127.0.0.1", port, *sizes, TIMEOUT_S, **own)
    to = DeltaShards(group.shards(held)) if shards else DeltaStream(group.transport())
    _here.update(opened=opened, policy=policy, held=held, to=to)


def read_layout() -> Any:
    """Which engine rank has what."""
    return _here["held"]


def refit() -> str:
    """What was said if it failed."""
    try:
        _here["policy"].refit(_here["to"])
    except RefitError as error:
        return str(error)
    return ""


class Following(refit_engine.SmallEngine):
    """An engine rank that takes whatever it is given; nobody sees half of it."""

    seen = threading.Lock()

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        with self.seen:
            for name, tensor in tensors:
                self.weights.setdefault(name, torch.empty_like(tensor))
            super().load(tensors)


def look(frame: FrameType, event: str, _: Any) -> None:
    """Be killed after so many calls of our functions from the first of the named one on."""
    code = frame.f_code
    if not _armed or event != "call" or not any(name in code.co_filename for name in OURS):
        return
    function, left = _armed[0]
    if function in ("", code.co_qualname):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        _armed[0] = ("", left - 1)


def start_engine(*place: Any) -> None:
    """Be that rank of a group, and receive one refit after another."""
    engine = Following({})
    receiver = Receiver(engine.load, timeout_s=TIMEOUT_S)
    refit_engine._here |= {"engine": engine, "receiver": receiver}
    collective_engine.join(*place)

    def follow() -> None:
        while True:
            refit_engine._here["said"] = ""
            try:
                collective_engine.receive()
            except RefitError as error:
                refit_engine._here["said"] = str(error)
            _received.release()

    threading.setprofile(look)
    threading.Thread(target=follow, daemon=True).start()
    threading.setprofile(None)  # type: ignore[arg-type]


def arm(function: str, calls: int) -> None:
    """See `look`; of what was received before nothing is said."""
    while _received.acquire(blocking=False):
        pass
    _armed[:] = [(function, calls)]


def wait_for_one() -> None:
    """Return when a refit has been received, or has failed."""
    _received.acquire()


def read_weights() -> tuple[str, Bits]:
    """What was said last, and what the engine rank has."""
    with Following.seen:
        return refit_engine._here["said"], bits(refit_engine._here["engine"].weights)


class Group:
    """Two trainers and two engine ranks, each a process that can be killed."""

    def __init__(self, way: str, port: int, config: dict[str, Any]) -> None:
        self._way, self._port, self._config, self._number = way, port, config, 0
        self.trainers = self.start_trainers()
        self._held = self.trainers[0].call(read_layout)
        self._may_have: list[list[Bits]] = [[], []]
        self.engines = [self.start_engine(rank) for rank in BOTH]

    def start_trainers(self) -> list[OtherProcess]:
        return start_trainers(self._config, open_trainer, self._way, self._port)

    def start_engine(self, rank: int) -> OtherProcess:
        process, shards = OtherProcess(), self._way == "shards"
        first, train = (2, 2) if shards else (1, None)
        place = (self._port, first + rank, first + len(BOTH), train, TIMEOUT_S)
        process.call(start_engine, *place)
        self._may_have[rank].insert(0, {})
        return process

    def begin(self) -> None:
        """Begin a refit of other weights."""
        self._number += 1
        for process in self.trainers:
            process.begin(change, self._number)
        new, _ = [process.result(TIMEOUT_S) for process in self.trainers]
        for rank in BOTH:
            whole = self._way == "group"
            self._may_have[rank].append(new if whole else shards_of(new, self._held, rank))

    def send(self) -> None:
        for process in self.trainers:
            process.begin(refit)

    def results(self) -> list[str | None]:
        """What trainers have said of a refit; None of one that was killed."""
        return read_results(self.trainers, TIMEOUT_S)

    def check(self) -> None:
        """Each engine rank has what some refit has sent, and none older than it had."""
        for process, may_have in zip(self.engines, self._may_have, strict=True):
            said, found = process.call(read_weights)
            assert found in may_have, said
            del may_have[: may_have.index(found)]

    def refit(self) -> None:
        """One that works."""
        self.begin()
        self.send()
        assert self.results() == ["", ""]
        self.check()
        assert [len(each) for each in self._may_have] == [1, 1]

    def kill_trainer(self, rank: int, function: str, calls: int) -> None:
        rank = 0 if any(part in function for part in OF_RANK_0[self._way]) else rank
        for _ in range(MOST_REFITS):
            self.begin()
            self.trainers[rank].call(die_after, function, calls)
            self.send()
            if (said := self.results())[rank] is None:
                break
            assert said == ["", ""]
            calls = 0  # fewer follow it
        assert said[rank] is None, f"{function} is not called"
        assert said[1 - rank] is not None
        self.check()
        self.trainers[1 - rank].kill()  # as whoever has started it does
        self.trainers = self.start_trainers()

    def kill_engine(self, rank: int, function: str, calls: int) -> None:
        victim = self.engines[rank]
        if function in PREPARED:
            victim.call(PREPARED[function])
            calls %= FEW_CALLS  # the next refit is another one
        for _ in range(MOST_REFITS):
            self.begin()
            victim.call(arm, function, calls)
            victim.begin(wait_for_one)
            self.send()
            try:
                victim.result(TIMEOUT_S)
            except EOFError:
                self.engines[rank] = self.start_engine(rank)
                self.results()
                break
            self.results()
            calls = 0  # fewer follow it
        assert self.engines[rank] is not victim, f"{function} is not called"
        self.check()

    def end(self) -> None:
        for process in (*self.engines, *self.trainers):
            process.kill()


@contextmanager
def grouped(way: str, path: Path) -> Iterator[Group]:
    """Those of a small model, which refit in that way."""
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": TIMEOUT_S}
    with reserved_port() as port:
        group = Group(way, port, policy_config(path, TP2, **top))
        try:
            yield group
        finally:
            group.end()


def kill_again_and_again(path: Path, way: str, victim: str, phases: tuple[str, ...]) -> None:
    """One in each of these functions; after each a refit works."""
    draw = random.Random(f"{way} {victim}")
    with grouped(way, path) as group:
        kill = getattr(group, f"kill_{victim}")
        group.refit()
        for phase in phases:
            kill(draw.randrange(2), phase, draw.randrange(MOST_CALLS))
            group.refit()


@pytest.mark.daily
@pytest.mark.parametrize("way", PHASES)
def test_an_engine_rank_is_killed_while_it_joins_and_while_it_applies_changes(
    checkpoint: Any, way: str
) -> None:
    kill_again_and_again(checkpoint("qwen2", **SIZES), way, "engine", (*JOIN, *TAKE[1:3]))


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["trainer", "engine"])
@pytest.mark.parametrize("way", PHASES)
def test_who_is_killed_at_a_random_moment_leaves_no_mixture_and_the_next_refit_works(
    checkpoint: Any, way: str, victim: str
) -> None:
    phases = PHASES[way][victim]
    each = tuple(phases[number % len(phases)] for number in range(KILLS))
    kill_again_and_again(checkpoint("qwen2", **SIZES), way, victim, each)
