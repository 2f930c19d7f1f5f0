"""The rank pool: what a rank says reaches the test, and nothing of one run reaches the next."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, RankPool


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum_of_ranks(scale: int) -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(_rank() * scale)])
    dist.all_reduce(total)
    return _rank(), int(os.environ["WORLD_SIZE"]), total.item()


def _raise_on_rank_1() -> None:
    dist.init_process_group("gloo")
    if _rank() == 1:
        print("said before raising")
        raise KeyError("the value of rank one")
    dist.barrier()


def _wait_forever_on_rank_1() -> None:
    if _rank() == 1:
        _a_wait_that_never_ends()


def _a_wait_that_never_ends() -> None:
    time.sleep(3600)


def _hang_in_a_collective() -> None:
    dist.init_process_group("gloo")
    if _rank() == 0:
        dist.barrier()
    _a_wait_that_never_ends()


def _die_on_rank_1(how: str) -> None:
    if _rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_everything_behind() -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    os.environ["LEFT_BEHIND"] = "yes"
    torch.manual_seed(99)


def _what_is_left() -> tuple[bool, bool, bool, float]:
    from megatron.core import parallel_state

    return (
        dist.is_initialized(),
        parallel_state.model_parallel_is_initialized(),
        "LEFT_BEHIND" in os.environ,
        torch.rand(()).item(),
    )


def _threads_of_the_fork_server() -> int:
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(status.split("Threads:")[1].split()[0])


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and "Z" not in stat.read_text().split()


def _assert_works(ranks: RankPool) -> None:
    assert ranks.run(2, _sum_of_ranks, 10) == [(0, 2, 10.0), (1, 2, 10.0)]


def _many_small_views() -> list[torch.Tensor]:
    whole = torch.arange(4096, dtype=torch.bfloat16, requires_grad=True)
    return [whole[i : i + 2] for i in range(0, 4096, 2)]


def test_ranks_are_one_group_and_results_come_in_rank_order_and_by_value(ranks: RankPool) -> None:
    assert ranks.run(3, _sum_of_ranks, 1) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    _assert_works(ranks)
    (views,) = ranks.run(1, _many_small_views)
    assert len(views) == 2048
    assert torch.equal(torch.cat(views), torch.arange(4096, dtype=torch.bfloat16))
    assert max(view.untyped_storage().nbytes() for view in views) == 4


def test_ranks_fork_from_a_process_of_one_thread_and_run_what_can_be_sent(ranks: RankPool) -> None:
    assert ranks.run(1, _threads_of_the_fork_server) == [1]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ranks.run(1, lambda: None)


def test_a_raising_ranks_traceback_and_output_reach_the_test(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(2, _raise_on_rank_1)
    message = str(failure.value)
    assert "rank1 raised" in message
    assert "KeyError: 'the value of rank one'" in message
    assert "in _raise_on_rank_1" in message
    assert "said before raising" in message
    _assert_works(ranks)


@pytest.mark.dear
@pytest.mark.parametrize("hang", [_wait_forever_on_rank_1, _hang_in_a_collective])
def test_a_hang_is_ended_at_the_timeout_and_its_stack_is_shown(ranks: RankPool, hang) -> None:
    _assert_works(ranks)
    pids = ranks.pids
    with pytest.raises(RankFailure, match="rank1 hung: no result in 2 s") as failure:
        ranks.run(2, hang, timeout=2)
    assert "_a_wait_that_never_ends" in str(failure.value)
    assert not [pid for pid in pids if _is_alive(pid)]
    _assert_works(ranks)
    assert not set(pids) & set(ranks.pids)


@pytest.mark.parametrize(("how", "code"), [("exit", "7"), ("kill", "-9")])
def test_a_rank_that_dies_is_named_with_its_exit_code(ranks: RankPool, how: str, code: str) -> None:
    with pytest.raises(RankFailure, match=f"rank1 died: exit code {code}"):
        ranks.run(2, _die_on_rank_1, how)
    _assert_works(ranks)


def test_the_same_processes_start_every_run_clean(ranks: RankPool) -> None:
    ranks.run(2, _what_is_left)
    pids = ranks.pids
    first = ranks.run(2, _what_is_left)
    ranks.run(2, _leave_everything_behind)
    assert ranks.run(2, _what_is_left) == first
    assert first[0][:3] == (False, False, False)
    assert ranks.pids == pids
