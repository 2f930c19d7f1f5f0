"""A worker that raises, dies or cannot start: the driver hears of it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import RayVirtualCluster, WorkerGroup
from tests.ray.actors import GroupMaker, Worker, promptly, still_running


def test_an_exception_in_one_rank_raises_while_the_others_sleep_on_and_again_when_asked(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(tp=2, dp=2), diary=str(diary))
    with promptly(), pytest.raises(WorkerError) as caught:
        group.run_all("act", how={2: "raise"}, others="sleep")
    error = caught.value
    assert error.rank == 2
    assert "the reactor of rank 2 is too hot" in str(error)
    assert "in _raise" in error.cause, "the worker's own traceback is missing"
    assert "rank(s) 0, 1, 3 had not finished" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    for call in (
        lambda: group.run_all("act", how={}),
        lambda: group.run_sharded("act", data=[1, 2]),
    ):
        with (
            promptly(),
            pytest.raises(WorkerError, match=r"is broken.*rank 2 raised RuntimeError") as caught,
        ):
            call()
        assert caught.value.rank == 2
    assert group.shutdown()


def test_an_exception_in_one_rank_raises_while_the_others_wait_in_a_collective(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(tp=2), diary=str(diary), join=True)
    assert group.run_all("act", how={}, others="reduce") == ["2 ranks met"] * 2
    with promptly(), pytest.raises(WorkerError, match="the reactor of rank 0 is too hot") as caught:
        group.run_sharded("act", data=[None], how={0: "raise"}, others="reduce")
    assert caught.value.rank == 0
    assert group.shutdown()


@pytest.mark.parametrize("moment", ["die", "late"])
def test_the_death_is_blamed_and_not_the_collective_that_broke_by_it(
    make_group: GroupMaker, diary: Path, moment: str
) -> None:
    group = make_group(Topology(tp=2), diary=str(diary), join=True)
    with promptly(), pytest.raises(WorkerError, match="act: rank 1 died") as caught:
        group.run_all("act", how={1: moment}, others="reduce")
    assert caught.value.rank == 1
    assert group.shutdown()


def test_a_worker_killed_from_outside_during_a_call_is_reported(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(dp=2), diary=str(diary))
    refs = group.submit_all("act", how={}, others="sleep")
    os.kill(group.pids[1], signal.SIGKILL)
    with promptly(), pytest.raises(WorkerError, match="rank 1 died") as caught:
        group.collect("act", refs)
    assert str(group.pids[1]) in caught.value.cause, "Ray's report names the process"
    assert group.shutdown()


def test_a_worker_that_died_between_calls_is_reported_by_the_next(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(dp=2), diary=str(diary))
    os.kill(group.pids[0], signal.SIGKILL)
    with promptly(), pytest.raises(WorkerError, match="rank 0 died"):
        group.run_all("act", how={})
    assert group.shutdown()


def check_broken(group: WorkerGroup) -> None:
    with promptly(), pytest.raises(WorkerError, match="is broken"):
        group.run_all("act", how={})


def test_an_error_of_our_own_kind_comes_back_as_itself(make_group: GroupMaker) -> None:
    group, words = make_group(Topology(tp=2)), "rank 1 cannot do that; ask for less"
    with promptly(), pytest.raises(ConfigError, match=words) as caught:
        group.run_all("act", how={1: "refuse"}, others="sleep")
    assert isinstance(caught.value.__cause__, WorkerError)
    assert caught.value.__cause__.rank == 1
    check_broken(group)


def test_a_refusal_by_whole_replicas_leaves_the_group_usable_and_one_by_a_part_breaks_it(
    make_group: GroupMaker,
) -> None:
    group = make_group(Topology(tp=2, dp=2))
    fine = [f"rank {rank} is fine" for rank in range(4)]
    for how, others in (({}, "refuse"), ({2: "refuse", 3: "refuse"}, "slowly")):
        with promptly(), pytest.raises(ConfigError, match="cannot do that"):
            group.run_all("act", how=how, others=others)
        assert group.run_all("act", how={}) == fine
    with promptly(), pytest.raises(ConfigError, match="cannot do that"):
        group.run_all("act", how={1: "refuse"})  # although the others finish
    check_broken(group)


def test_an_error_beside_a_refusal_breaks_the_group(make_group: GroupMaker) -> None:
    group = make_group(Topology(dp=2))
    with promptly(), pytest.raises((ConfigError, WorkerError)):
        group.run_all("act", how={0: "refuse", 1: "raise"})
    check_broken(group)


def test_an_exception_that_cannot_travel_is_told_in_words(make_group: GroupMaker) -> None:
    group = make_group(Topology())
    with promptly(), pytest.raises(WorkerError, match="nobody may see the reactor") as caught:
        group.run_all("act", how={0: "hide"})
    assert caught.value.rank == 0


def test_a_constructor_that_raises_is_heard_while_the_others_wait_for_it(diary: Path) -> None:
    cluster = RayVirtualCluster([2], use_gpus=False)
    kwargs = {"diary": str(diary), "refuse_on": 1, "join": True}
    with (
        promptly(),
        pytest.raises(ConfigError, match=r"^rank 1 does not like this\nsecond line$") as caught,
    ):
        WorkerGroup(cluster, Worker, Topology(tp=2), kwargs=kwargs)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert caught.value.__cause__.rank == 1
    assert len(list(diary.iterdir())) == 2
    assert not still_running(diary)
    assert WorkerGroup(cluster, Worker, Topology(tp=2)).shutdown(), "the room was not given back"
    cluster.shutdown()


def test_an_error_of_our_own_kind_is_not_mistaken_for_what_it_led_to(
    make_group: GroupMaker,
) -> None:
    with promptly(), pytest.raises(WorkerError, match="and that is why") as caught:
        make_group(Topology(), refuse_on=0, wrap=True)
    assert "does not like this" in caught.value.cause


def test_a_process_that_dies_in_its_constructor_is_reported(
    make_group: GroupMaker, diary: Path
) -> None:
    with promptly(), pytest.raises(WorkerError, match="constructor: rank 0 died") as caught:
        make_group(Topology(tp=2), diary=str(diary), die_on=0, join=True)
    assert caught.value.rank == 0


def test_shutdown_does_not_wait_for_workers_that_never_answer(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(tp=2), diary=str(diary))
    group.submit_all("act", how={}, others="sleep")
    assert group.shutdown()
    assert not still_running(diary, within_s=0)
    assert ray.is_initialized()
