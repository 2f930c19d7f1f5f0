"""Two ranks of which one raises, is killed, is stopped, comes late or leaves early: what the other
hears in each primitive, in time and by name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron_policy.coordination.operation import REFITS, Coordinator
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.coordination.store import Heartbeat, StoreCalls
from megatron_policy.errors import CheckpointError, RefitError
from tests import coordination_ranks
from tests.coordination_parts import (
    AGREEMENTS,
    GROUPS,
    HANG_S,
    LONG_S,
    REFITTING,
    REPEATED,
    SAVING,
)
from tests.coordination_ranks import COMES_LATE, IS_KILLED, IS_STOPPED, LEAVES, RAISES
from tests.other_process import OtherProcess

SHORT_S = 3.0
FAULTS = (RAISES, IS_KILLED, IS_STOPPED, LEAVES)
NAMES = [part.__name__ for part in (*SAVING, *REFITTING, *GROUPS, *AGREEMENTS)]

Heard = dict[str, str]


class Stage:
    """Plays every part with a fault on one of the two ranks, each fault once."""

    def __init__(self) -> None:
        self._processes: list[OtherProcess] = []
        self._heard: dict[tuple[str, int], list[Heard]] = {}

    def heard(self, fault: str, culprit: int) -> list[Heard]:
        """What the other rank heard; what the culprit heard, unless it was killed; and what both
        heard when they played again.
        """
        if (fault, culprit) not in self._heard:
            try:
                self._heard[fault, culprit] = self._play(fault, culprit)
            except BaseException:
                self.close()
                raise
        return self._heard[fault, culprit]

    def close(self) -> None:
        """End the processes."""
        while self._processes:
            self._processes.pop().kill()

    def _play(self, fault: str, culprit: int) -> list[Heard]:
        self._processes = [each for each in self._processes if each.alive]
        while len(self._processes) < 2:
            self._processes.append(OtherProcess())
        processes = self._processes
        faulty, other = processes[culprit], processes[1 - culprit]
        at_once = fault in (RAISES, COMES_LATE, IS_KILLED)
        timeout_s = (HANG_S if fault == IS_KILLED else LONG_S) if at_once else SHORT_S
        with reserved_port() as port:
            for rank, process in enumerate(processes):
                process.begin(coordination_ranks.take_place, rank, port, culprit, timeout_s)
            for process in processes:
                process.result(HANG_S)
            # Where a timeout is short, the time of the culprit's own start is not to be part of it.
            for process in (other, faulty) if at_once else (faulty, other):
                process.begin(coordination_ranks.begin, fault if process is faulty else "")
                process.result(HANG_S)
            if fault == IS_KILLED:
                faulty.kill()
            elif fault == IS_STOPPED:
                faulty.stop()
            heard = [self._finished(other)]
            if fault == IS_KILLED:
                return heard
            if fault == IS_STOPPED:
                faulty.go_on()
            heard.append(self._finished(faulty))
            for process in processes:
                process.begin(coordination_ranks.play_again)
            return heard + [process.result(HANG_S) for process in processes]

    def _finished(self, process: OtherProcess) -> Heard:
        process.begin(coordination_ranks.finish)
        heard: Heard = process.result(HANG_S)
        return heard


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def reasons(fault: str, culprit: int, silence: str) -> tuple[str, ...]:
    """How a rank that calls the store can be told what has happened to the other."""
    if fault == RAISES:
        return (f"rank {culprit}: ",)
    return {
        (IS_KILLED, 0): ("the rendezvous on rank 0 has left, or was ended",),
        (IS_KILLED, 1): ("rank 1 has left, or was ended: look into its log",),
        # It can have been silent already for a while.
        (IS_STOPPED, 0): ("the rendezvous on rank 0 does not answer", silence),
    }.get((fault, culprit), (silence,))


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_rank_is_raised_on_the_other_in_every_primitive(stage, fault, culprit) -> None:
    heard = stage.heard(fault, culprit)[0]
    for part in (*SAVING, *REFITTING, *GROUPS, *AGREEMENTS):
        said = heard[name := part.__name__]
        late = f"did not take part within {SHORT_S:g} s"
        if part in SAVING:
            # What ends an operation that has succeeded here is logged.
            words = reasons(fault, culprit, f"no sign of life for {SHORT_S:g} s")
            logged = "'done here, but a rank may not know that all are: "
            last = name == "operation_leave_together"
            assert said.startswith(logged if last else "CheckpointError: "), name
            assert any(each in said for each in words), (name, said)
            assert "the cause" in said or fault != RAISES, name
        elif name == "refit_shut_down":  # a rank that is gone needs nothing
            assert said == "'down'"
        elif part in REFITTING:
            words = reasons(fault, culprit, f"a rank {late}")
            assert said.startswith("RefitError: "), name
            assert any(each in said for each in words), (name, said)
            assert ("RuntimeError: the cause" in said) == (fault == RAISES), name
        elif part in GROUPS:
            assert said.startswith(f"RefitError: {name}: a process ")
            gone = fault not in (IS_STOPPED, LEAVES) and "has left, or was ended" in said
            assert gone or late in said, (name, said)
        elif fault == RAISES:
            assert said == "BatchError: elsewhere"
        else:
            assert said.startswith(("RuntimeError: ", "DistBackendError: "))
            assert any(each in said for each in ("Timed out", "closed", "reset")), said


WHOLE = {
    "operation_wait_for_all": "'all have written'",
    "operation_wait_for": "'here'",
    "operation_check_same": "'all have found the same'",
    "operation_leave_together": "''",
    "refit_gather": "'of rank 0, of rank 1'",
    "refit_collect_failures": "'all have succeeded'",
    "refit_broadcast": "'words'",
    "refit_shut_down": "'down'",
    "agreement_prepare_together": "[10, -1, 1, 10]",
    "group_all_gather": "[1, 10]",
    "group_sum": "[11, 11, 11]",
}


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_comes_late_is_waited_for(stage: Stage, culprit: int) -> None:
    expected = WHOLE | {"group_broadcast": f"{[10**culprit] * 3}"}
    for heard in stage.heard(COMES_LATE, culprit)[:2]:
        assert {name: heard[name] for name in NAMES} == {name: expected[name] for name in NAMES}


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_raises_hears_its_own_reason(stage: Stage, culprit: int) -> None:
    own = stage.heard(RAISES, culprit)[1]
    assert [name for name in NAMES if "the cause" not in own[name]] == []


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_was_stopped_does_not_go_on_without_the_others(stage, culprit) -> None:
    own = stage.heard(IS_STOPPED, culprit)[1]
    together = ["refit_gather", "refit_collect_failures", "refit_broadcast"]
    together += [part.__name__ for part in GROUPS]
    for name in together:
        assert own[name].startswith("RefitError: "), name
    for name in ("operation_wait_for_all", "operation_check_same"):
        # Rank 1 had done its part when rank 0 stopped answering, and could not take that back.
        silent = own[name].startswith("CheckpointError: ") and "no sign of life" in own[name]
        assert silent or (culprit == 0 and own[name] == WHOLE[name]), name


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", [RAISES, IS_STOPPED, LEAVES])
def test_what_follows_a_fault_succeeds(stage: Stage, fault: str, culprit: int) -> None:
    for again in stage.heard(fault, culprit)[2:]:
        for part in REPEATED:
            assert again[part.__name__] == WHOLE[part.__name__], part.__name__


@pytest.fixture
def host() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


def test_calls_of_a_store_fail_at_once_after_its_host_has_not_answered(host: OtherProcess) -> None:
    lost: list[str] = []
    with reserved_port() as port:
        host.call(coordination_ranks.host_store, port)
        store = coordination_ranks.join_store(port)
        call = StoreCalls(1.0, RefitError, lambda: lost.append("a rank"))
        answered = StoreCalls(LONG_S, RefitError)
        assert answered(lambda: store.add("number", 1)) == 1
        host.stop()
        with pytest.raises(
            RefitError, match=r"the rendezvous on rank 0 does not answer \(no answer within 1.75 s"
        ):
            call(lambda: store.add("number", 0))
        for _ in range(2):
            with pytest.raises(RefitError, match="does not answer"):
                call(lambda: lost.append("a call that is not made"))
        assert lost == ["a rank"]
        host.go_on()
        assert answered(lambda: store.add("number", 1)) == 2
        host.kill()
        with pytest.raises(RefitError, match=r"the rendezvous on rank 0 has left, or was ended"):
            answered(lambda: store.add("number", 1))


def test_a_rank_that_has_failed_says_why_also_where_the_store_is_gone() -> None:
    operation = Coordinator(REFITS, dist.HashStore(), 1, 2, LONG_S).begin()
    operation.call.failure = "the rendezvous on rank 0 has left"
    with pytest.raises(RefitError, match="the cause"):
        operation.collect_failures(RuntimeError("the cause"))
    with pytest.raises(RefitError, match="has left"):
        operation.collect_failures(None)


def test_heartbeats_over_a_store_that_is_gone_end_without_a_word(monkeypatch) -> None:
    beaten, raised = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def beat(by: int) -> int:
        beaten.set()
        raise CheckpointError("the rendezvous on rank 0 has left")

    with Heartbeat(beat, 0.1, 0.1).beating():
        assert beaten.wait(HANG_S)
    assert not raised
