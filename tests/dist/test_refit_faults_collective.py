"""Faults in a group of trainers and engines: the other side notices them in time, and the next
refit works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.coordination.process_group import BoundedProcessGroup, PendingCollective
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.transports.collective.transport import Collective
from tests import collective_engine, refit_engine
from tests.collective_engine import SECRET
from tests.other_process import OtherProcess
from tests.refit_engine import bits
from tests.refit_trainer import FORMS, StandIn, weights

TIMEOUT_S, BUCKET = 3.0, 4096
# No measurement, on a busy machine either: nothing waits for the other side without end.
IN_TIME_S = 90.0


@dataclass(frozen=True)
class Plan:
    """What the transport uses of a plan."""

    tensors: tuple[RefitTensor, ...]
    bucket_bytes: int = BUCKET
    stages: tuple[int, ...] = (0,)


class Trainer(StandIn):
    """One rank."""

    def begin(self) -> None:
        """Nobody to count with."""

    def plan(self, **options: Any) -> Plan:
        return Plan(super().plan().tensors)


class Group:
    """A trainer in this process, and what it sends."""

    def __init__(self, port: int, engines: int = 1) -> None:
        self._exporter = Trainer(weights(0), TIMEOUT_S)
        self.group = Collective.join(
            self._exporter, "127.0.0.1", port, engines + 1, timeout_s=TIMEOUT_S, secret=SECRET
        )

    def refit(self, seed: int, during: Any = lambda name: None) -> RefitManifest:
        trainer = Trainer(weights(seed), TIMEOUT_S, during)
        return deliver(trainer, self.group.transport(), step=seed)


@pytest.fixture
def group() -> Iterator[Group]:
    with reserved_port() as port:
        made = Group(port)
        made.port = port
        yield made
        made.group.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[OtherProcess]]:
    started = [OtherProcess(), OtherProcess()]
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def engine(engines: list[OtherProcess], group: Group) -> OtherProcess:
    """A process that has joined the group; where a test has killed it, another."""
    return joined(engines, 0, group.port)


def alive(engines: list[OtherProcess], number: int) -> OtherProcess:
    """That process, or another where a test has ended it or left it during a call."""
    with contextlib.suppress(OSError, EOFError, RefitError):
        if engines[number].call(os.getpid) == engines[number].pid:
            return engines[number]
    engines[number].kill()
    engines[number] = OtherProcess()
    return engines[number]


def joined(engines: list[OtherProcess], number: int, port: int, **options: Any) -> OtherProcess:
    process = alive(engines, number)
    die_at, world = options.pop("die_at", 0), options.pop("world", 2)
    rank, secret = options.pop("rank", number + 1), options.pop("secret", SECRET)
    process.call(
        refit_engine.start, FORMS, die_at, {"timeout_s": TIMEOUT_S, "staged": True, **options}
    )
    process.call(collective_engine.join, port, rank, world, None, TIMEOUT_S, secret)
    return process


def assert_refits(group: Group, *engines: OtherProcess, seed: int) -> None:
    """A refit that works, to the bit."""
    for engine in engines:
        engine.begin(collective_engine.receive)
    group.refit(seed)
    for engine in engines:
        assert engine.result() == seed
        assert engine.call(refit_engine.state)[:3] == (bits(weights(seed)), seed, False)


def assert_fails(
    group: Group,
    *engines: OtherProcess,
    seed: int,
    during: Any = lambda name: None,
    trainer: str,
    engine: str | None = None,
    error: Any = RefitError,
) -> None:
    """A refit of which the trainer hears that in time, and every engine that."""
    started = time.monotonic()
    for each in engines:
        each.begin(collective_engine.receive)
    with pytest.raises(RefitError, match=trainer):
        group.refit(seed, during)
    assert time.monotonic() - started < IN_TIME_S
    for each in engines:
        with pytest.raises(error, match=engine):
            each.result()


def failing_at(name: str) -> Callable[[str], None]:
    def fail(tensor: str) -> None:
        if tensor == name:
            raise RefitError("the gather has failed")

    return fail


def test_refits_follow_each_other_in_one_group_and_older_weights_are_refused(
    group: Group, engine: OtherProcess
) -> None:
    assert_refits(group, engine, seed=1)
    notes = group.group.member._store.count()
    for seed in (2, 2, 5):
        assert_refits(group, engine, seed=seed)
    assert group.group.member._store.count() == notes, "those of a refit go when the next begins"
    chunks = -(-sum(t.numel() * t.element_size() for t in weights(0).values()) // BUCKET)
    assert 4 * chunks <= group.group.broadcasts <= 4 * (chunks + 1)
    assert group.group.member._made_in == 1, "one group for all"
    for seed in (6, 7):
        older = f"step 4 are older than those of step {seed - 1}"
        assert_fails(group, engine, seed=4, trainer=older, engine="older")
        assert_refits(group, engine, seed=seed)
        assert group.group.member._store.count() == notes, "of a group that has ended nothing stays"


def test_an_engine_needs_the_secret_which_every_policy_makes_anew(
    group: Group, engines: list[OtherProcess]
) -> None:
    secrets = set()
    for _ in range(2):
        with reserved_port() as port:
            made = Collective.join(Trainer(weights(0)), "127.0.0.1", port, 2)
            secrets.add(made.secret)
            made.close()
    assert len(secrets) == 2 and {len(secret) for secret in secrets} == {64}
    with pytest.raises(ConfigError, match=r"secret=.*get_refit_secret"):
        join_collective("127.0.0.1", group.port, 1, 2)
    stranger = joined(engines, 1, group.port, rank=1, secret=secrets.pop())
    with pytest.raises(RefitError, match="refuses this process: its secret is a different one"):
        stranger.call(collective_engine.receive)
    assert_refits(group, joined(engines, 0, group.port), seed=1)
    assert stranger.call(refit_engine.state)[1] is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"session": "a", "number": "1", "over": 0}', b"\x80\x04N."]
)
def test_a_note_that_cannot_be_read_is_named(
    group: Group, engine: OtherProcess, content: bytes
) -> None:
    group.group.member._store.put("call", content)
    with pytest.raises(RefitError, match=r"the note 'call' .* cannot be read.*same version"):
        engine.call(collective_engine.receive)
    # The next call replaces it, but an engine that looks before that would fail once more.
    group.group.member._store.drop(["call"])
    assert_refits(group, engine, seed=1)


def test_all_engines_have_the_weights_and_one_that_refuses_is_named_before_any_is_sent(
    engines: list[OtherProcess],
) -> None:
    with reserved_port() as port:
        group = Group(port, engines=2)
        both = [joined(engines, number, port, world=3) for number in range(2)]
        assert_refits(group, *both, seed=1)
        sent = group.group.broadcasts
        other = {**FORMS, "norm": ((34,), torch.bfloat16)}
        both[1].call(refit_engine.start, other, 0, {"timeout_s": TIMEOUT_S})
        refusal = r"engine 1: .*not the weights of .*: .*norm"
        # The other one may come when it is over, and wait for the next.
        heard = "norm|has not begun a refit"
        assert_fails(group, *both, seed=2, trainer=refusal, engine=heard)
        assert group.group.broadcasts == sent
        assert both[0].call(refit_engine.state)[:2] == (bits(weights(1)), 1)
        both[1].call(refit_engine.start, FORMS, 0, {"timeout_s": TIMEOUT_S})
        assert_refits(group, *both, seed=3)
        group.group.close()


def test_an_engine_that_is_not_there_is_named(group: Group) -> None:
    assert_fails(group, seed=1, trainer=r"engine 0 did not get ready within 2\.25 s")


@pytest.mark.nightly
def test_an_engine_that_nobody_sends_to_raises_and_receives_the_next_time(
    group: Group, engine: OtherProcess
) -> None:
    for seed in (1, 2):
        with pytest.raises(RefitError, match="has not begun a refit within"):
            engine.call(collective_engine.receive)
        assert_refits(group, engine, seed=seed)


def test_an_engine_killed_amid_the_chunks_fails_the_trainer_and_another_takes_its_place(
    group: Group, engines: list[OtherProcess]
) -> None:
    dying = joined(engines, 0, group.port, die_at=2, staged=False)
    gone = EOFError, OSError
    words = {"trainer": "engine 0 has left, or was ended"}
    assert_fails(group, dying, seed=1, during=lambda name: time.sleep(0.1), error=gone, **words)
    assert_refits(group, joined(engines, 0, group.port), seed=2)


def test_an_engine_that_is_stopped_fails_the_trainer_in_time_and_may_come_back(
    group: Group, engine: OtherProcess
) -> None:
    assert_refits(group, engine, seed=1)
    engine.begin(collective_engine.receive)

    def stop(name: str) -> None:
        if name == "layers.1.weight":
            os.kill(engine.pid, signal.SIGSTOP)

    try:
        assert_fails(group, seed=2, during=stop, trainer="a process did not take part within")
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    with pytest.raises(RefitError):
        engine.result()
    assert engine.call(refit_engine.state)[:2] == (bits(weights(1)), 1), "it has what it had"
    assert_refits(group, engine, seed=3)


@pytest.mark.daily
@pytest.mark.parametrize("staged", [True, False])
def test_a_trainer_that_gives_up_is_heard_of_at_once_and_leaves_mixed_what_is_not_staged(
    group: Group, engines: list[OtherProcess], staged: bool
) -> None:
    engine = joined(engines, 0, group.port, staged=staged)
    assert_refits(group, engine, seed=1)
    assert (len(engine.call(refit_engine.state)[3]) == 1) == staged, "or a load for each chunk"
    assert_fails(
        group,
        engine,
        seed=2,
        during=failing_at("router.bias"),
        trainer="the gather has failed",
        engine="the trainer gave up",
    )
    assert engine.call(refit_engine.state)[2] != staged, "mixed"
    assert_refits(group, engine, seed=3)


def test_a_byte_that_changes_on_the_way_is_refused_by_name(
    group: Group, engine: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refits(group, engine, seed=1)
    send = BoundedProcessGroup.broadcast

    def flip(self: BoundedProcessGroup, chunk: torch.Tensor, source: int) -> Any:
        chunk[7] ^= 1
        return send(self, chunk, source)

    with monkeypatch.context() as patch:
        patch.setattr(BoundedProcessGroup, "broadcast", flip)
        wrong = "with a wrong digest: .*embed"
        assert_fails(group, engine, seed=2, trainer=f"engine 0: .*{wrong}", engine=wrong)
    assert engine.call(refit_engine.state)[:3] == (bits(weights(1)), 1, False)
    assert_refits(group, engine, seed=3)


def serve(port: int, kill_at: str) -> None:
    """A slow trainer, which is killed after that tensor."""

    def act(name: str) -> None:
        time.sleep(0.2)
        if name == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Group(port).refit(1, during=act)


@pytest.mark.parametrize("killed", [False, True])
def test_a_trainer_that_is_stopped_or_killed_fails_the_engine_in_time_and_another_is_heard(
    engines: list[OtherProcess], killed: bool
) -> None:
    trainer = OtherProcess()
    trainer.call(os.getpid)  # it has started
    with reserved_port() as port:
        engine = joined(engines, 0, port)
        started = time.monotonic()
        engine.begin(collective_engine.receive)
        trainer.begin(serve, port, "layers.3.weight" if killed else "")
        if not killed:
            time.sleep(1.0)
            os.kill(trainer.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RefitError):
                engine.result()
            assert time.monotonic() - started < IN_TIME_S
        finally:
            trainer.kill()
        assert engine.call(refit_engine.state)[1] is None
        with pytest.raises(RefitError, match="cannot be reached"):
            engine.call(collective_engine.receive)
        group = Group(port)
        assert_refits(group, engine, seed=2)
        group.group.close()


_serving: list[Group] = []


def serve_once(port: int) -> None:
    """A refit of a trainer that stays."""
    _serving.append(Group(port))
    _serving[0].refit(1)


def test_an_engine_that_waits_hears_a_trainer_that_is_started_in_place_of_another(
    engines: list[OtherProcess],
) -> None:
    trainer = OtherProcess()
    trainer.call(os.getpid)  # it has started
    with reserved_port() as port:
        engine = joined(engines, 0, port, timeout_s=IN_TIME_S)
        engine.begin(collective_engine.receive)
        trainer.call(serve_once, port)
        assert engine.result() == 1
        engine.begin(collective_engine.receive)
        time.sleep(0.5)  # it waits for the second one
        trainer.kill()
        group = Group(port)
        group.refit(2)
        assert engine.result() == 2
        group.group.close()


def test_an_error_that_is_kept_keeps_no_connection() -> None:
    """What gloo calls work keeps those of a group: another rank may wait for their end."""

    class Work:
        pass

    def fail(timeout: Any) -> None:
        raise RuntimeError("a connection is closed")

    channel, work = BoundedProcessGroup("group", dist.HashStore(), 0, 1, TIMEOUT_S), Work()
    work.wait = fail  # type: ignore[attr-defined]
    kept, pending = weakref.ref(work), PendingCollective(channel, work)
    del work
    with pytest.raises(RefitError, match="a process has left") as raised:
        pending.wait()
    channel.close(broken=True)
    assert raised.value.__cause__ is not None and kept() is None


@pytest.mark.parametrize(
    ("world", "train", "legal"),
    [(1, None, "no rank for an engine"), (3, 2, "1 ranks train"), (1, 1, "no")],
)
def test_sizes_that_leave_no_engine_are_refused(world: int, train: int | None, legal: str) -> None:
    with pytest.raises(ConfigError, match=legal):
        Collective.join(Trainer(weights(0)), "127.0.0.1", 1, world, train)


def test_a_port_that_is_taken_and_the_rank_of_no_engine_are_refused(group: Group) -> None:
    with pytest.raises(RefitError, match=f"cannot be hosted at 127.0.0.1:{group.port}.*free port"):
        Group(group.port)
    for rank, train in ((0, None), (3, None), (1, 2), (3, 2)):
        with pytest.raises(ConfigError, match="is not an engine's"):
            join_collective("127.0.0.1", 1, rank, 3, train, secret=SECRET)
