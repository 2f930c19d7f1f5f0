"""Ranks that go through saves and loads together: what each hears of the others' failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps

import pytest
import torch.distributed as dist

from megatron_policy.coordination.operation import (
    _GIVEN_UP,
    REFITS,
    SAVES,
    Coordinator,
    Operation,
    OperationKind,
)
from megatron_policy.errors import CheckpointError, RefitError

TIMEOUT_S = 1.0
LONG_S = 600.0
WORLD = 3
ERRORS = (CheckpointError, RefitError)
WORDS = "found {own}, the other {first}"


def begin(world: int = 2, timeout_s: float = TIMEOUT_S) -> list[Operation]:
    """One operation of each rank."""
    store = dist.HashStore()
    return [Coordinator(SAVES, store, rank, world, timeout_s).begin() for rank in range(world)]


def finish(operation: Operation, stage: str) -> None:
    with operation.critical_section(stage):
        pass


def fail(operation: Operation, stage: str = "") -> None:
    """It does not wait for a rank that shows no sign of life."""
    with pytest.raises(CheckpointError, match="the cause"), operation.critical_section(stage):
        raise RuntimeError("the cause")


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[threading.Event]:
    """Work in a thread, which is joined; the event is set when it is done."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    yield done
    thread.join(600)
    assert done.is_set()


def test_a_rank_that_is_late_hears_of_every_failure_that_it_missed() -> None:
    store = dist.HashStore()
    early, late = (Coordinator(SAVES, store, rank, 2, TIMEOUT_S) for rank in range(2))
    for number in range(2):
        with pytest.raises(CheckpointError), early.begin().critical_section():
            raise OSError(28, "No space left on device", f"file {number}")
    for number in range(2):
        with pytest.raises(CheckpointError, match=f"rank 0: file {number}: No space left"):
            late.begin().wait_for("where")


def test_all_ranks_raise_the_failure_that_came_first() -> None:
    first, second = begin()
    fail(first, "written")
    with (
        pytest.raises(CheckpointError, match="rank 0: the cause"),
        second.critical_section("written"),
    ):
        raise FileNotFoundError(2, "No such file or directory", "what the other took away")
    with pytest.raises(CheckpointError, match="rank 0: the cause"):
        second.wait_for_all("written")


def test_where_all_have_arrived_a_failure_that_follows_stops_nobody() -> None:
    """Or one rank would go on beside its training, and the other raise."""
    hasty, late = begin()
    for each in (hasty, late):
        finish(each, "ready")
    hasty.wait_for_all("ready")
    fail(hasty)
    late.wait_for_all("ready")
    with pytest.raises(CheckpointError, match="rank 0: the cause"):
        late.wait_for("where")


def test_ranks_that_have_found_different_things_all_hear_of_it() -> None:
    one, other = begin()
    with one.critical_section("found"):
        one.check_same("value", "a save", WORDS)
    with (
        pytest.raises(CheckpointError, match="found another, the other a save"),
        other.critical_section(),
    ):
        other.check_same("value", "another", WORDS)
    with pytest.raises(CheckpointError, match="rank 1: found another"):
        one.wait_for_all("found")


def test_an_empty_message_is_a_message() -> None:
    one, other = begin()
    one.publish("where", "")
    assert other._values.agree_on("where", _GIVEN_UP) != _GIVEN_UP, "who gives up late wins over it"
    assert one.wait_for("where") == other.wait_for("where") == ""


Work = Callable[[int, Operation], object]
"""What a rank does in an operation."""


def meet(_: int, operation: Operation) -> None:
    operation.run_together("written", lambda: None)


def publish(rank: int, operation: Operation) -> None:
    if rank == 0:
        operation.publish("where", "here")
    assert operation.wait_for("where") == "here"
    meet(rank, operation)


def broadcast(rank: int, operation: Operation) -> None:
    assert operation.broadcast("words" if rank == 1 else None) == "words"


def gather(rank: int, operation: Operation) -> None:
    found = operation.gather(f"of rank {rank}")
    assert found == ([f"of rank {each}" for each in range(WORLD)] if rank == 0 else [])
    broadcast(rank, operation)


def collect_failures(rank: int, operation: Operation) -> None:
    reasons = operation.collect_failures(RuntimeError(f"cause {rank}") if rank else None)
    assert "cause 1" in reasons and "cause 2" in reasons


def leaving(work: Work) -> Work:
    @wraps(work)
    def all_leave(rank: int, operation: Operation) -> None:
        work(rank, operation)
        operation.leave_together()

    return all_leave


def fail_at_a_barrier(culprit: int, rank: int, operation: Operation) -> None:
    with pytest.raises(ERRORS, match="the cause"):
        with operation.critical_section("written"):
            if rank == culprit:
                raise KeyError("the cause")
        operation.wait_for_all("written")


def abort_before_a_gathering(culprit: int, rank: int, operation: Operation) -> None:
    if rank == culprit:
        operation.abort(KeyError("the cause"))
        return
    with pytest.raises(ERRORS, match=f"rank {culprit}: .*the cause"):
        operation.gather("a part")
        operation.broadcast("words" if rank == 1 else None)


def abort_where_the_others_leave(culprit: int, rank: int, operation: Operation) -> None:
    if rank == culprit:
        operation.abort(KeyError("the cause"))
    else:
        operation.leave_together()


def each_rank(coordinators: list[Coordinator], work: Work) -> None:
    """What all ranks do in their next operation, at once."""
    with ThreadPoolExecutor(len(coordinators)) as threads:
        begun = [(each.rank, each.begin()) for each in coordinators]
        for part in [threads.submit(work, *each) for each in begun]:
            part.result(600)


WORKS = [meet, publish, broadcast, gather, collect_failures]
FAILING = [fail_at_a_barrier, abort_before_a_gathering, abort_where_the_others_leave]
KINDS = pytest.mark.parametrize("kind", [SAVES, REFITS], ids=lambda kind: kind.name)


def begin_ranks(kind: OperationKind) -> tuple[dist.Store, list[Coordinator]]:
    store = dist.HashStore()
    return store, [Coordinator(kind, store, rank, WORLD, LONG_S) for rank in range(WORLD)]


@pytest.mark.parametrize("work", WORKS)
@KINDS
def test_of_an_operation_that_all_have_left_nothing_stays_in_the_store(kind, work) -> None:
    store, coordinators = begin_ranks(kind)
    before = store.num_keys()
    for _ in range(2):
        each_rank(coordinators, leaving(work))
        assert store.num_keys() == before


def test_signs_of_life_that_only_others_have_given_go_too() -> None:
    store, coordinators = begin_ranks(SAVES)
    before = store.num_keys()

    last, *others = (each.begin() for each in coordinators)
    for each in others:
        each.beat()
        each.go_last()
    last.go_last()  # at once: it has not looked at signs of life
    assert store.num_keys() == before


@pytest.mark.parametrize(
    "work",
    [
        *WORKS,
        *(
            pytest.param(partial(work, culprit), id=f"{work.__name__}-{culprit}")
            for work in FAILING
            for culprit in range(2)
        ),
    ],
)
@KINDS
def test_what_other_operations_leave_in_the_store_goes_with_the_next(kind, work) -> None:
    store, coordinators = begin_ranks(kind)
    before = store.num_keys()
    for _ in range(2):
        for _ in range(3):
            each_rank(coordinators, work)
        each_rank(coordinators, leaving(meet))
        assert store.num_keys() == before


@KINDS
def test_no_call_in_an_operation_hears_what_an_earlier_one_wrote(kind) -> None:
    def work(rank: int, operation: Operation) -> None:
        for words in ("first", "second"):
            parts = operation.gather(f"{words} of {rank}")
            assert parts == ([f"{words} of {each}" for each in range(WORLD)] if rank == 0 else [])
        for words in ("first", "second"):
            assert operation.broadcast(words if rank == 1 else None) == words
        for words in ("first", "second"):
            failure = RuntimeError(words) if rank == 1 else None
            reasons = operation.collect_failures(failure)
            assert reasons.startswith("rank 1: ") and reasons.endswith(words)
        assert operation.collect_failures(None) == ""

    each_rank(begin_ranks(kind)[1], leaving(work))


@pytest.mark.parametrize("sizes", [(0, 1), (8 * 2**20 + 1, 0), (1, 20 * 2**20)])
def test_words_of_any_size_go_through_torchs_own_store(sizes: tuple[int, int]) -> None:
    """It drops a connection at a value of more than 8 MiB. The digests of all tensors of a mixture
    of experts, by name, can be as many bytes.
    """
    own = [str(rank) * size for rank, size in enumerate(sizes)]

    def work(rank: int, operation: Operation) -> None:
        assert operation.gather(own[rank]) == (own if rank == 0 else [])
        assert operation.broadcast(own[1] if rank == 1 else None) == own[1]

    timeout = timedelta(seconds=LONG_S)
    host = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, 2, False, timeout, wait_for_workers=False)
    coordinators = [
        Coordinator(REFITS, store, rank, 2, LONG_S) for rank, store in enumerate((host, guest))
    ]
    before = host.num_keys()
    each_rank(coordinators, leaving(work))
    assert host.num_keys() == before


def test_silence_is_told_and_a_rank_that_arrives_after_another_has_given_up_gives_up_too() -> None:
    """Or it would go on, with what the other has not done."""
    waiting, late = begin()
    finish(waiting, "ready")
    with pytest.raises(CheckpointError, match=r"no sign of life for 1 s.*checkpoint_timeout_s"):
        waiting.wait_for_all("ready")
    finish(late, "ready")
    with pytest.raises(CheckpointError, match="rank 0: a rank gave no sign of life"):
        late.wait_for_all("ready")


def test_a_rank_that_arrives_last_after_a_failure_does_not_go_on_alone() -> None:
    waiting, failing, late = begin(world=3)
    for each in (waiting, failing):
        finish(each, "ready")
    fail(failing)
    with pytest.raises(CheckpointError, match="rank 1: the cause"):
        waiting.wait_for_all("ready")
    finish(late, "ready")
    with pytest.raises(CheckpointError, match="rank 1: the cause"):
        late.wait_for_all("ready")


def test_a_rank_that_fails_goes_when_the_others_have_come_to_hear_of_it() -> None:
    failing, working = begin()
    with beside(lambda: fail(failing, "verified")) as gone:
        with working.critical_section("verified"):
            # Longer than silence is borne: signs of life go on.
            assert not gone.wait(2 * TIMEOUT_S)
        with pytest.raises(CheckpointError, match="rank 0: the cause"):
            working.wait_for_all("verified")


def test_no_rank_goes_before_all_are_done() -> None:
    early, late = begin()
    with beside(early.leave_together) as gone:
        with late.critical_section("written"):
            assert not gone.wait(2 * TIMEOUT_S)
        late.leave_together()


def test_what_is_done_stays_done_when_a_rank_is_gone_in_the_end(caplog) -> None:
    here = Coordinator(SAVES, dist.HashStore(), 0, 2, TIMEOUT_S)
    here.begin().leave_together()
    assert here.lost_a_rank and "no sign of life for 1 s" in caplog.text


def test_a_rank_that_has_failed_is_not_waited_for_in_the_end(caplog) -> None:
    store = dist.HashStore()
    coordinators = [Coordinator(SAVES, store, rank, 2, 1000.0) for rank in range(2)]
    done, failing = (coordinator.begin() for coordinator in coordinators)
    with beside(lambda: fail(failing)):  # nor does it wait for the others
        done.leave_together()
        assert coordinators[0].lost_a_rank and "rank 1: the cause" in caplog.text
    with pytest.raises(CheckpointError):
        done.wait_for_all("written")
