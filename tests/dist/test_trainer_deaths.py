"""A trainer that is killed in any phase of a refit or a save: the other one hears of it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.checkpoint.writing import BackgroundWorker
from megatron_policy.coordination.operation import Operation
from megatron_policy.coordination.process_group import BoundedProcessGroup, ProcessGroups
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import CheckpointError, RefitError
from megatron_policy.refit.deltas.changes import SentCopy
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import DirectorySession, HfDirectory
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.layouts import LAYOUTS
from tests.dist.test_delta_refit import BUCKET, disturb
from tests.dist.test_detached_refit import SIZES
from tests.dist.test_shard_refit_deaths import Phase, die_in
from tests.other_process import OtherProcess

TIMEOUT_S = 900.0  # nothing here waits so long: who does has not heard of the death
BOTH = range(2)
HEARD = (
    "rank {} has left, or was ended: look into its log",
    "a process has left, or was ended",  # said by the group in which they exchange weights
    "the rendezvous on rank 0 has left, or was ended",
)
_here: dict[str, Any] = {}


def publish(folder: str) -> None:
    _here["policy"].refit(HfDirectory(f"{folder}/whole"))


def publish_changes(folder: str) -> None:
    deltas = DeltaDirectory(f"{folder}/deltas")
    _here["policy"].refit(deltas)
    disturb(_here["policy"], 1, 0.5)
    _here["policy"].refit(deltas)


def publish_beside(folder: str) -> None:
    _here["policy"].begin_refit(HfDirectory(f"{folder}/beside"))
    _here["policy"].finish_refit()


def save(folder: str) -> None:
    _here["policy"].save_checkpoint(f"{folder}/saved")


DAILY, EVERY_DAY = (
    pytest.mark.daily,
    ("joining one of them", "agreeing", "arriving with a checkpoint"),
)
PHASES: dict[str, tuple[Callable[[str], None], Phase]] = {
    "joining groups": (publish, (ProcessGroups, "join", 1)),
    "joining one of them": (publish, (BoundedProcessGroup, "__init__", 2)),
    "gathering": (publish, (BoundedProcessGroup, "all_gather", 2)),
    "writing": (publish, (DirectorySession, "place", 3)),
    "telling": (publish, (DirectorySession, "finish", 1)),
    "agreeing": (publish, (Operation, "collect_failures", 1)),
    "leaving": (publish, (Operation, "go_last", 1)),
    "gathering beside training": (publish_beside, (BoundedProcessGroup, "all_gather", 2)),
    "comparing": (publish_changes, (SentCopy, "advance", 1)),
    "publishing changes": (publish_changes, (Operation, "gather", 1)),
    "writing a checkpoint": (save, (BackgroundWorker, "__init__", 1)),
    "arriving with a checkpoint": (save, (Operation, "arrive", 2)),
}


def open_trainer(variables: dict[str, str], config: dict[str, Any]) -> None:
    os.environ.update(variables)
    _here["opened"] = opened = ExitStack()
    _here["policy"] = opened.enter_context(open_policy(config, **UNUSED))


def try_to(act: Callable[[str], None], folder: str) -> str:
    """What was said if it failed."""
    try:
        act(folder)
    except (RefitError, CheckpointError) as error:
        return str(error)
    return ""


def start_trainers(
    config: dict[str, Any], opening: Callable[..., None] = open_trainer, *more: Any
) -> list[OtherProcess]:
    """Two ranks of a policy, each a process that can be killed."""
    started = [OtherProcess() for _ in BOTH]
    with reserved_port() as port:
        at = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for number, process in enumerate(started):
            at |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            process.begin(opening, dict(at), config, *more)
        for process in started:
            process.result()
    return started


@pytest.fixture
def start() -> Iterator[Callable[[dict[str, Any]], list[OtherProcess]]]:
    """`start_trainers`, whose processes end with the test."""
    started: list[OtherProcess] = []

    def start(config: dict[str, Any]) -> list[OtherProcess]:
        started.extend(start_trainers(config))
        return started

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize(
    "phase", [pytest.param(each, marks=DAILY if each in EVERY_DAY else ()) for each in PHASES]
)
def test_the_other_trainer_hears_at_once(
    start: Any, checkpoint: Any, tmp_path: Path, phase: str, rank: int
) -> None:
    act, dies = PHASES[phase]
    top = {"refit_timeout_s": TIMEOUT_S, "checkpoint_timeout_s": TIMEOUT_S}
    top |= {"refit_bucket_bytes": BUCKET}
    config = policy_config(checkpoint("qwen2", **SIZES), LAYOUTS["TP2"].megatron, **top)
    processes = start(config)
    processes[rank].call(die_in, dies)
    for process in processes:
        process.begin(try_to, act, str(tmp_path))
    with pytest.raises(EOFError):
        processes[rank].result()
    said = processes[1 - rank].result()
    assert any(words.format(rank) in said for words in HEARD) or phase == "leaving", said
    again = processes[1 - rank].call(try_to, act, str(tmp_path))
    assert any(words.format(rank) in again for words in HEARD), again
