"""A rank that leaves when its part is done takes nothing away from the others, and one that leaves
before hears, and lets them hear, what happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import CheckpointError, RefitError
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS
from tests.other_process import OtherProcess
from tests.soak.saves import CASES, LAG_S, MODEL, Stage

UNUSED = {"init_optimizer": False, "init_reference_model": False}
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def model(checkpoint) -> Path:
    return checkpoint("qwen2", **MODEL)


@pytest.mark.parametrize("name", CASES)
def test_what_rank_0_was_last_to_do_succeeds_on_every_rank(model, tmp_path, name: str) -> None:
    """The others are slow to hear of it: the store has to be there for them."""
    assert not Stage(model, tmp_path).play(0, name, lag_s=LAG_S)


PLACES = LAYOUTS | FSDP2_LAYOUTS


def iterate(config: dict[str, Any], early: int) -> str:
    """What this rank hears of an iteration that rank `early` does not finish; the next is whole."""
    with open_policy(config, **UNUSED) as policy:
        heard = ""
        if policy.rank == early:
            next(iter(policy.export()))
        else:
            with pytest.raises(RefitError) as error:
                dict(policy.export())
            heard = str(error.value)
        assert len(dict(policy.export())) > 2
        return heard


@pytest.mark.parametrize("name", ["DP2", "TP2", "FSDP2 x 2"])
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_leaves_an_iteration_early_fails_the_others_and_the_next_is_whole(
    ranks, model, name: str, early: int
) -> None:
    heard = ranks.run(2, iterate, policy_config(model, PLACES[name].megatron), early)
    assert f"rank {early}: it was left before its last tensor" in heard[1 - early]


def join(rank: int, world: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def joined(world: int) -> Iterator[list[OtherProcess]]:
    """Processes that are ranks, and may end."""
    processes = [OtherProcess() for _ in range(world)]
    try:
        with reserved_port() as port:
            for rank, process in enumerate(processes):
                process.call(join, rank, world, port)
            yield processes
    finally:
        for process in processes:
            process.kill()


def leave_first(config: dict[str, Any], root: Path, leaving: int, what: str) -> str:
    """What a rank hears of a call that the other does not make, because its process ends."""
    with open_policy(config, **UNUSED) as policy:
        dict(policy.export())  # both have their policies by the end of it
        if policy.rank == leaving:
            os._exit(0)
        with pytest.raises((CheckpointError, RefitError)) as error:
            dict(policy.export()) if what == "export" else policy.save_checkpoint(root)
        return str(error.value)


@pytest.mark.parametrize("what", ["export", "save"])
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("name", ["DP2", "FSDP2 x 2"])
def test_the_error_says_whether_a_rank_left_or_gave_no_sign_of_life(
    model, tmp_path, name: str, what: str, leaving: int
) -> None:
    times = {"refit_timeout_s": TIMEOUT_S, "checkpoint_timeout_s": TIMEOUT_S}
    config = policy_config(model, PLACES[name].megatron, **times)
    with joined(2) as processes:
        for process in processes:
            process.begin(leave_first, config, tmp_path / "run", leaving, what)
        said = processes[1 - leaving].result()
    if leaving == 0:
        assert "the rendezvous on rank 0 has left" in said
    elif name == "DP2" or what == "save":
        assert f"{TIMEOUT_S:g} s" in said
    else:  # they exchange weights, and connections end with a process
        assert "a process has left, or was ended, after" in said
