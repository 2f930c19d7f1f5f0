"""A worker whose process or node stops: the driver's call ends and names the rank, and work that
only takes long goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from megatron_policy.errors import WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers.cluster import watch
from tests.ray.actors import (
    LONG_S,
    GroupMaker,
    promptly,
    still_running,
    wait_until_stopped,
)

LIMIT_S = 3.0


@pytest.mark.nightly
def test_a_worker_that_stops_in_a_call_of_its_own_ends_the_call(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(dp=2), timeout_s=LIMIT_S, diary=str(diary))
    with promptly(), pytest.raises(WorkerError, match="act: rank 1 has stopped") as caught:
        group.run_all("act", how={1: "stop"})
    assert caught.value.rank == 1
    assert f"process {group.pids[1]} " in caught.value.cause
    assert "worker_timeout_s" in caught.value.cause
    with promptly(), pytest.raises(WorkerError, match=r"is broken.*act: rank 1 has stopped"):
        group.run_all("act", how={})
    assert group.shutdown()
    assert not still_running(diary, within_s=0)


def test_a_worker_that_stopped_between_calls_ends_the_next(make_group: GroupMaker) -> None:
    group = make_group(Topology(dp=2), timeout_s=LIMIT_S)
    os.kill(group.pids[0], signal.SIGSTOP)
    with promptly(), pytest.raises(WorkerError, match="echo: rank 0 has stopped"):
        group.run_sharded("echo", data=[1, 2])
    assert group.shutdown()


@pytest.mark.nightly
def test_a_worker_that_stops_is_named_while_another_waits_for_it_in_a_collective(
    make_group: GroupMaker,
) -> None:
    group = make_group(Topology(tp=2), timeout_s=LIMIT_S, join=True)
    with promptly(), pytest.raises(WorkerError, match="rank 0 has stopped") as caught:
        group.run_all("act", how={0: "stop"}, others="reduce")
    assert "rank(s) 1 had not finished" in str(caught.value)
    assert group.shutdown()


@pytest.mark.nightly
def test_a_stopped_worker_is_named_although_the_failure_of_another_comes_first(
    make_group: GroupMaker,
) -> None:
    group = make_group(Topology(tp=2), timeout_s=600.0)
    with promptly(600.0), pytest.raises(WorkerError, match="act: rank 1 has stopped") as caught:
        group._watch.interval_s = 0.2  # of 600 s it would be a long one
        group.run_all("act", how={1: "stop"}, others="late_raise")
    assert "rank 0 raised RuntimeError" in str(caught.value)
    assert group.shutdown()


@pytest.mark.nightly
def test_a_worker_that_stops_in_its_constructor_ends_it(
    make_group: GroupMaker, diary: Path
) -> None:
    where = {"diary": str(diary), "stop_on": 1, "join": True}
    with promptly(), pytest.raises(WorkerError, match="constructor: rank 1 has stopped"):
        make_group(Topology(tp=2), timeout_s=LIMIT_S, **where)
    assert not still_running(diary)


@pytest.mark.nightly
def test_a_future_of_a_worker_that_stops_raises_and_has_its_rank(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(dp=2), timeout_s=LIMIT_S, diary=str(diary))
    assert ray.get(group.futures("act", how={})) == ["rank 0 is fine", "rank 1 is fine"]
    refs = group.futures("act", how={1: "stop"})
    with promptly(), pytest.raises(ray.exceptions.RayActorError, match=r"workers-\w+ rank 1"):
        ray.get(refs)
    with promptly(), pytest.raises(WorkerError, match=r"is broken.*act: rank 1 has stopped"):
        group.run_all("act", how={})
    assert group.shutdown()


@pytest.mark.nightly
def test_work_that_takes_longer_than_a_worker_may_be_stopped_goes_on(
    make_group: GroupMaker,
) -> None:
    assert LONG_S > 2 * LIMIT_S
    group = make_group(Topology(dp=3), timeout_s=LIMIT_S)
    fine = ["rank 0 is fine", "rank 1 is fine", "rank 2 is fine"]
    long = {0: "hold", 1: "compute", 2: "nap"}
    assert group.run_all("act", how=long) == fine
    assert ray.get(group.futures("act", how=long)) == fine


def test_a_worker_that_is_stopped_and_goes_on_in_time_completes_the_call(
    make_group: GroupMaker,
) -> None:
    group = make_group(Topology(dp=2), timeout_s=600.0)

    def wake() -> None:
        wait_until_stopped(group.pids[1])
        os.kill(group.pids[1], signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    assert group.run_all("act", how={1: "stop"}) == ["rank 0 is fine", "goes on"]
    waker.join()


def test_a_driver_that_was_stopped_itself_blames_nobody_for_that_time(
    make_group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(Topology())
    os.kill(group.pids[0], signal.SIGSTOP)
    wait_until_stopped(group.pids[0])
    clock = [time.monotonic()]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    for passed in (5.0, 3600.0):
        clock[0] += passed
        group._watch.look()
        assert group._watch.find_lost([0]) == []
    for _ in range(8):
        clock[0] += 2.5
        group._watch.look()
    assert [failure.headline() for failure in group._watch.find_lost([0])] == ["rank 0 has stopped"]
    monkeypatch.undo()


@pytest.mark.nightly
def test_a_step_over_two_nodes_is_that_of_one_process_and_a_node_that_dies_or_stops_ends_the_call(
    checkpoint: Callable[..., Path],
) -> None:
    # Here, because it brings Megatron-Core, which the other tests do without.
    from tests.ray.policies import VOCAB

    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.two_nodes", str(checkpoint("qwen2", vocab=VOCAB))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
