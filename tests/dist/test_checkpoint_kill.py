"""Ranks that are killed or stopped at any moment of a save: whoever lives hears of it in time, and
the last complete checkpoint is whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron_policy.converters.files import publishing
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import CheckpointError
from tests.dist.cases import open_policy
from tests.dist.layouts import FSDP2_LAYOUTS, VOCAB, layout
from tests.dist.resuming import (
    config_of,
    differing,
    leftovers,
    optimizer_of,
    paths,
    prints,
    resumed,
    train,
    weights_of,
)
from tests.other_process import OtherProcess
from tests.ranks import RankPool

WORLD, TIMEOUT_S = 2, 2.0
IN_TIME_S = 6 * TIMEOUT_S  # not as a measurement: nobody waits without end for who is gone
AT_ONCE = 3  # groups of ranks, which spend their time waiting for each other
CHANGING = {"write", "pwrite", "pwritev", "writev", "ftruncate", "posix_fallocate", "open", "mkdir"}
COMMITTING = {"fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "put"}


@contextlib.contextmanager
def watched(act_at: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """What the body does to the disk: calls into the system, by whichever thread that it starts.
    `act` is called before step `act_at`, counted from 1.
    """
    names: list[str] = []
    lock = threading.Lock()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        name = _step(frame, event, argument)
        if name:
            with lock:
                names.append(name)
                due = len(names) == act_at
            if due:
                act()

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield names
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _step(frame: FrameType, event: str, argument: Any) -> str:
    if event == "c_call":
        owner = getattr(argument, "__self__", None)
        ours = getattr(owner, "__name__", "") in ("posix", "_io") or type(owner).__module__ == "_io"
        return argument.__name__ if ours and argument.__name__ in CHANGING | COMMITTING else ""
    # Two directories change their names in a call that no profiler sees: just before and after it.
    code, named = frame.f_code, event in ("call", "return")
    return "put" if named and code is publishing.put.__code__ else ""


@dataclass(frozen=True)
class Moment:
    """What happens to whom, and when in the save."""

    background: bool
    again: bool = False
    """The save takes the place of one of the same step."""
    victim: int = -1
    everybody: bool = False
    stopped: bool = False
    """Not killed, but it gives no more sign of life."""
    step: int = 0
    """Before this step of the victim's."""
    after_s: float = 0.0
    """Or so long after the save has begun."""


Heard = tuple[str, float, list[str]]
Outcomes = dict[str, tuple[Path, list[Heard | None]]]
"""The run after each save, and what each rank has heard; None of one that was killed."""


def join(rank: int, port: int) -> int:
    """Be that rank from here on; returns the process id."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return os.getpid()


def save_under_fire(config: dict[str, Any], root: Path, moment: Moment, pids: list[int]) -> Heard:
    """What this rank hears of its save, after how long, and the steps that it took."""
    struck = signal.SIGSTOP if moment.stopped else signal.SIGKILL

    def strike() -> None:
        for pid in pids if moment.everybody else []:
            if pid != os.getpid():
                os.kill(pid, struck)
        os.kill(os.getpid(), struck)

    with resumed(config, root, init_reference_model=False) as policy:
        train(policy, [1])
        if moment.again:
            policy.save_checkpoint(**paths(root))
            policy.finalize_async_save()
        is_victim = policy.rank == moment.victim
        if is_victim and moment.after_s:
            threading.Timer(moment.after_s, strike).start()
        heard, started = "", time.monotonic()
        with watched(moment.step if is_victim else 0, strike) as steps:
            try:
                policy.save_checkpoint(**paths(root))
                policy.finalize_async_save()
            except CheckpointError as error:
                heard = str(error) or "an error without a message"
        return heard, time.monotonic() - started, steps


class Stage:
    """Plays saves in processes that are started for them."""

    def __init__(self, ranks: RankPool, path: Path, megatron: dict[str, Any], folder: Path) -> None:
        """`megatron` is a layout of `WORLD` ranks. `ranks` save a first checkpoint, of which every
        save gets a copy.
        """
        self._path, self._megatron, self._folder = path, megatron, folder
        self._starting = threading.Lock()  # it sets the environment for a moment
        ranks.run(WORLD, save_first, self.config(False), folder / "first")

    def config(self, background: bool) -> dict[str, Any]:
        checkpoint = {"checkpoint": {"async_save": background}}
        return config_of(self._path, self._megatron, checkpoint, checkpoint_timeout_s=TIMEOUT_S)

    def play_all(self, moments: dict[str, Moment]) -> Outcomes:
        """All saves, a few at a time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(self._play, moments, moments.values())
            return dict(zip(moments, found, strict=True))

    def _play(self, name: str, moment: Moment) -> tuple[Path, list[Heard | None]]:
        root = shutil.copytree(self._folder / "first", self._folder / name)
        with self._starting:
            ranks = [OtherProcess() for _ in range(WORLD)]
        try:
            with reserved_port() as port:
                pids = [process.call(join, rank, port) for rank, process in enumerate(ranks)]
                for process in ranks:
                    process.begin(
                        save_under_fire, self.config(moment.background), root, moment, pids
                    )
                silent = moment.victim if moment.stopped else -1
                return root, [
                    None if rank == silent else _answer(process)
                    for rank, process in enumerate(ranks)
                ]
        finally:
            for process in ranks:
                process.kill()


def _answer(process: OtherProcess) -> Heard | None:
    try:
        answer: Heard = process.result()
    except (EOFError, OSError):
        return None
    return answer


SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
REPLICAS = layout(WORLD, **SHARDED).megatron
SHARING_EXPERTS = layout(WORLD, expert_model_parallel_size=WORLD, **SHARDED).megatron
LORA = {"peft": {"enabled": True, "dim": 4, "alpha": 8.0, "dropout": 0.1}}
AFTER_A_KILL = {
    "shared experts": ("qwen3_moe", SHARING_EXPERTS),
    "shared weights": ("qwen2", FSDP2_LAYOUTS["FSDP2 x 2"].megatron),
    "adapters": ("qwen2", REPLICAS | LORA),
}


def save_first(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, [0])
        policy.save_checkpoint(**paths(root))


def inspect_all(config: dict[str, Any], roots: list[Path]) -> list[int]:
    """The step that each run goes on from, as it was trained until then; then it saves, and leaves
    nothing else behind.
    """
    steps = []
    with open_policy(config, init_reference_model=False) as policy:
        expected = {}
        for number in range(2):
            train(policy, [number])
            expected[number + 1] = prints(weights_of(policy) | optimizer_of(policy))
        for root in roots:
            steps.append(policy.load_checkpoint(**paths(root)).step)
            found = prints(weights_of(policy) | optimizer_of(policy))
            assert differing(expected[steps[-1]], found) == [], root
            policy.save_checkpoint(**paths(root))
    return steps


CALM = {
    "sync": Moment(False),
    "async": Moment(True),
    "sync, again": Moment(False, again=True),
    "async, again": Moment(True, again=True),
}


def moments(calm: dict[str, list[Heard]]) -> dict[str, Moment]:
    """Twenty to be killed at: of any step, of those at which something is settled, of those at
    which rank 0 makes directories visible, and of the time; and two to be stopped at. `calm` is
    what saves do that nobody disturbs.
    """
    dice = random.Random(6)
    chosen = {}
    for number in range(22):
        publishing, timed, stopped = 8 <= number < 16, 16 <= number < 20, number >= 20
        name = [*CALM][number % (4 if publishing else 2)]
        victim = 0 if publishing else number // 2 % 2
        _, seconds, steps = calm[name][victim]
        first = steps.index("put") if publishing else 0
        settling = COMMITTING if number % 4 > 1 or publishing else CHANGING | COMMITTING
        choice = [n for n, step in enumerate(steps, 1) if n > first and step in settling]
        chosen[f"{number}, {name}"] = replace(
            CALM[name],
            victim=victim,
            everybody=number % 5 == 4,
            stopped=stopped,
            step=0 if timed else dice.choice(choice),
            after_s=dice.uniform(0.001, seconds) if timed else 0.0,
        )
    return chosen


def assert_calm(outcomes: Outcomes) -> dict[str, list[Heard]]:
    """Saves that nobody disturbs succeed; returns what their ranks have heard."""
    calm = {name: [each for each in heard if each] for name, (_, heard) in outcomes.items()}
    for heard in calm.values():
        assert [words for words, _, _ in heard] == [""] * WORLD
        assert all({"fsync", "pwritev"} <= {*steps} for _, _, steps in heard)
    return calm


def assert_whole(ranks: RankPool, stage: Stage, outcomes: Outcomes) -> dict[str, int]:
    """Every run goes on from a whole checkpoint, the new one if a rank heard that it was saved, and
    nothing else is left behind; returns the steps.
    """
    roots = [root for root, _ in outcomes.values()]
    for steps in ranks.run(WORLD, inspect_all, stage.config(False), roots):
        for (name, (_, heard)), step in zip(outcomes.items(), steps, strict=True):
            done = "again" in name or any(each is not None and not each[0] for each in heard)
            assert step in ((2,) if done else (1, 2)), (name, step, heard)
    for root in roots:
        assert [name for at in paths(root).values() for name in leftovers(at)] == [], root
    return dict(zip(outcomes, steps, strict=True))


def assert_struck(outcomes: Outcomes, moments: dict[str, Moment]) -> None:
    """The victim is gone, and whoever lives has heard of it in time."""
    for name, moment in moments.items():
        _, heard = outcomes[name]
        assert moment.after_s or heard[moment.victim] is None, name
        assert all(each is None or each[1] < IN_TIME_S for each in heard), (name, heard)


@pytest.mark.nightly
def test_a_rank_killed_at_any_moment_of_a_save_costs_that_save_at_most(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=True, layers=2, hidden=32, ffn=64, vocab=VOCAB)
    stage = Stage(ranks, path, REPLICAS, tmp_path)
    outcomes = stage.play_all(CALM)
    chosen = moments(assert_calm(outcomes))
    outcomes |= stage.play_all(chosen)
    assert_struck(outcomes, chosen)
    steps = assert_whole(ranks, stage, outcomes)
    assert {steps[name] for name in chosen} == {1, 2}, "all were killed too late"


@pytest.mark.parametrize("what", AFTER_A_KILL)
def test_ranks_go_on_from_the_last_whole_checkpoint_after_a_kill(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    family, megatron = AFTER_A_KILL[what]
    path = checkpoint(family, layers=2, hidden=32, ffn=32, vocab=VOCAB)
    stage = Stage(ranks, path, megatron, tmp_path)
    outcomes = stage.play_all({"sync": Moment(False)})
    (calm,) = assert_calm(outcomes).values()
    (_, _, first), (_, _, second) = calm
    writing, publishing = second.index("pwritev") + 1, first.index("put") + 1
    chosen = {
        "while writing": Moment(False, victim=1, step=writing),
        "before anything is visible": Moment(False, victim=0, everybody=True, step=publishing),
        "when all is visible": Moment(False, victim=0, step=len(first)),
    }
    outcomes |= stage.play_all(chosen)
    assert_struck(outcomes, chosen)
    assert [*assert_whole(ranks, stage, outcomes).values()] == [2, 1, 1, 2]
