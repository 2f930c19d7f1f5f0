"""Ranks that are killed in any phase of a refit from shards to shards: those that are left hear of
it at once and have all of the old weights or of the new ones, and the next refit works.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.receive.assembler import ShardAssembler, WeightAssembler
from megatron_policy.refit.receive.collective import CollectiveGroup
from megatron_policy.refit.transports.collective.handshake import LOST, Sender, note_key
from megatron_policy.refit.transports.collective.stream import Writer
from tests import collective_engine, refit_engine
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import TP2
from tests.dist.test_delta_refit import BUCKET, disturb
from tests.dist.test_detached_refit import SIZES, bits_of
from tests.dist.test_shard_refit import held_by, join, receive, shards_of, start_empty
from tests.other_process import OtherProcess

TIMEOUT_S = 900.0  # nothing here waits so long: who does has not heard of a death
BOTH = range(2)
KILLS = 200

Phase = tuple[Any, str, int]
"""A class, its method, and in which call of that a process is killed."""

OF_A_NEW_GROUP: dict[str, Phase] = {
    "joining": (ControlStore, "process_group", 1),
    "joining the second sender": (ControlStore, "process_group", 2),
}
OF_ENGINES: dict[str, Phase] = {
    "reading the offer": (WeightAssembler, "announce", 1),
    "ready": (CollectiveGroup, "_join", 1),
    "receiving": (ShardAssembler, "put", 3),
    "checking": (ShardAssembler, "check", 1),
    "loading": (ShardAssembler, "finish", 1),
}
OF_TRAINERS: dict[str, Phase] = {
    "beginning": (Writer, "filled", 1),
    "sending": (BoundedProcessGroup, "send", 2),
    "ending": (Sender, "finish", 1),
    "waiting for acceptance": (ControlStore, "get", 3),
}
_here: dict[str, Any] = {}


def die_in(phase: Phase) -> None:
    """Be killed there."""
    holder, name, number = phase
    call, calls = getattr(holder, name), iter(range(1, number + 1))

    def die(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            if name == "announce":
                wait_for_the_other_engine()
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    setattr(holder, name, die)


def wait_for_the_other_engine() -> None:
    """It takes part: one that comes when a refit has failed waits for the next."""
    (group,) = collective_engine._group
    key = note_key(group._last, "ready", 1 - group._engine)
    group._store.get(key, TIMEOUT_S, "the other engine is not ready")


def open_trainer(
    variables: dict[str, str],
    config: dict[str, Any],
    port: int,
    mover: str | None,
    timeout_s: float,
) -> None:
    os.environ.update(variables)
    opened = ExitStack()
    policy = opened.enter_context(open_policy(config, **UNUSED))
    held = held_by(policy, Topology(tp=2))
    _here.update(opened=opened, policy=policy, held=held)
    _here["refits"] = join(policy, port, len(BOTH), timeout_s).shards(held, mover)


def change(number: int) -> tuple[Any, Any]:
    """Other weights; what they are, and the engine's layout."""
    disturb(_here["policy"], number, 0.5)
    return bits_of(_here["policy"]), _here["held"]


def send() -> str:
    """A refit; what was said if it failed."""
    try:
        _here["policy"].refit(_here["refits"])
    except RefitError as error:
        return str(error)
    return ""


class Ranks:
    """Two trainers and two engine ranks, each a process that can be killed."""

    def __init__(
        self,
        config: dict[str, Any],
        port: int,
        mover: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._config, self._port, self._number = config, port, 0
        self._mover, self._timeout_s = mover, timeout_s
        self.engines = [self.start_engine(rank) for rank in BOTH]
        self.trainers = self.start_trainers()
        self.old: list[Any] = [{}, {}]

    def start_engine(self, rank: int) -> OtherProcess:
        process = OtherProcess()
        process.call(start_empty, {"expected": None, "timeout_s": self._timeout_s})
        process.call(collective_engine.join, self._port, 2 + rank, 4, 2, self._timeout_s)
        return process

    def start_trainers(self) -> list[OtherProcess]:
        started = [OtherProcess() for _ in BOTH]
        with reserved_port() as port:
            at = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for rank, process in enumerate(started):
                at |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                own = (self._config, self._port, self._mover, self._timeout_s)
                process.begin(open_trainer, dict(at), *own)
            for process in started:
                process.result()
        return started

    def begin(self) -> list[Any]:
        """Begin a refit; what each engine rank is to have after it."""
        self._number += 1
        for process in self.trainers:
            process.begin(change, self._number)
        (whole, held), _ = [process.result() for process in self.trainers]
        for process in self.engines:
            process.begin(receive)
        for process in self.trainers:
            process.begin(send)
        return [shards_of(whole, held, rank) for rank in BOTH]

    def refit(self) -> None:
        """One that works."""
        self.old = self.begin()
        assert [process.result() for process in self.engines] == self.old
        assert [process.result() for process in self.trainers] == ["", ""]

    def check(self, rank: int, new: Sequence[Any]) -> None:
        """An engine rank has heard of the death, or has all of the new weights."""
        found = self.engines[rank].result()
        if isinstance(found, str):
            assert LOST in found or "cannot be reached" in found, found
            assert self.engines[rank].call(held_weights) == self.old[rank]
        else:
            assert found == new[rank]
            self.old[rank] = found

    def kill_engine(self, rank: int, phase: Phase) -> None:
        self.engines[rank].call(die_in, phase)
        new = self.begin()
        with pytest.raises(EOFError):
            self.engines[rank].result()
        said = [process.result() for process in self.trainers]
        assert all(f"engine {rank} {LOST}" in words for words in said), said
        self.check(1 - rank, new)
        self.engines[rank], self.old[rank] = self.start_engine(rank), {}

    def kill_trainer(self, rank: int, phase: Phase) -> None:
        self.trainers[rank].call(die_in, phase)
        new = self.begin()
        with pytest.raises(EOFError):
            self.trainers[rank].result()
        for each in BOTH:
            self.check(each, new)
        said = self.trainers[1 - rank].result()
        assert LOST in said or "cannot be reached" in said or "rendezvous on rank 0" in said, said
        self.trainers[1 - rank].kill()  # as whoever has started it does
        self.trainers = self.start_trainers()

    def end(self) -> None:
        for process in (*self.engines, *self.trainers):
            process.kill()


def held_weights() -> Any:
    """What an engine rank has."""
    return refit_engine.bits(refit_engine._here["engine"].weights)


@pytest.fixture
def ranks(checkpoint: Any) -> Iterator[Ranks]:
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": TIMEOUT_S}
    with reserved_port() as port:
        made = Ranks(policy_config(checkpoint("qwen2", **SIZES), TP2, **top), port)
        yield made
        made.end()


@pytest.mark.daily
def test_an_engine_rank_is_killed_in_each_phase(ranks: Ranks) -> None:
    for phase in OF_A_NEW_GROUP.values():
        ranks.kill_engine(0, phase)
    for number, phase in enumerate(OF_ENGINES.values()):
        ranks.refit()
        ranks.kill_engine(number % 2, phase)
    ranks.refit()


@pytest.mark.daily
@pytest.mark.parametrize("rank", BOTH)
def test_a_trainer_is_killed(ranks: Ranks, rank: int) -> None:
    ranks.refit()
    ranks.kill_trainer(rank, OF_TRAINERS["sending"])
    ranks.refit()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["engines", "trainers"])
def test_ranks_are_killed_again_and_again(ranks: Ranks, kind: str) -> None:
    draw, fine = random.Random(0), True
    kill: Callable[[int, Phase], None] = getattr(ranks, f"kill_{kind[:-1]}")
    phases = OF_ENGINES if kind == "engines" else OF_TRAINERS
    for _ in range(KILLS):
        new = {} if fine or kind == "trainers" else OF_A_NEW_GROUP
        kill(draw.choice(BOTH), draw.choice([*(phases | new).values()]))
        if fine := draw.random() < 0.5:
            ranks.refit()
    ranks.refit()
