"""A save in the background is of the moment in which it was called, whatever comes after.

Its copies are held up here until somebody waits for them: who changes what they read without
waiting is noticed by what is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.checkpoint import writing
from megatron_policy.errors import CheckpointError
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import IDLE, TRAIN
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share
from tests.dist.layouts import LENGTH, OVERLAPPED, SIZES, VOCAB, Layout, layout
from tests.dist.resuming import (
    TOKENIZER,
    config_of,
    differing,
    everything_of,
    leftovers,
    paths,
    prints,
    prompts,
    replaced,
    train,
)
from tests.ranks import RankPool

ASYNC = {"checkpoint": {"async_save": True}}
LAYOUTS: dict[str, tuple[str, bool, Layout]] = {
    "TP2, tied": ("qwen2", True, layout(2, tp=2)),
    "DP2, both overlaps": ("qwen3", False, layout(2, **OVERLAPPED)),
    "routers with biases": ("deepseek_v3", False, layout(1)),
}


class Hold:
    """Lets no copy begin before somebody waits for it, and keeps what the policy was then."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy, self.released = policy, threading.Event()
        self.then: list[str] = []

    def late(self, copy: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            assert self.released.wait(60), "nobody has waited for the copies"
            copy(*args)

        return call

    def asked(self, wait: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(copies: Any) -> None:
            if not self.released.is_set():
                self.then = live(self._policy)
                self.released.set()
            wait(copies)

        return call


@contextmanager
def held_up(policy: MegatronPolicy) -> Iterator[Hold]:
    hold = Hold(policy)
    with (
        replaced(writing, "_copy", hold.late),
        replaced(writing.Staging, "wait", hold.asked),
    ):
        try:
            yield hold
        finally:
            hold.released.set()


def live(policy: MegatronPolicy) -> list[str]:
    """Every bit that a save would write, as it is in memory now."""
    held = policy._checkpoints._contents.held(with_states=True)
    found = prints({str(n): each.tensor.clone() for n, each in enumerate(held)})
    return [found[str(n)] for n in range(len(held))]


def batch(policy: MegatronPolicy, seed: int = 0) -> Any:
    return own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=seed))


def read_in_every_way(policy: MegatronPolicy) -> None:
    data = batch(policy)
    policy.logprobs(data)
    policy.topk_logits(data, 2)
    policy.train(data, LOSSES["token"](), eval_mode=True, mbs=2)
    policy.generate(prompts())
    assert len(list(policy.export()))


def move(policy: MegatronPolicy, root: Path) -> None:
    """As on a GPU: storages are emptied, and filled again."""
    policy.memory.enter(IDLE)
    policy.memory.enter(TRAIN)


def take_a_step_in_parts(policy: MegatronPolicy, root: Path) -> None:
    policy.accumulator.begin(LOSSES["token"]())
    policy.accumulator.microbatch(batch(policy))
    policy.accumulator.finish()


def write_to_parameters(policy: MegatronPolicy, root: Path) -> None:
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.add_(1)


CHANGES: dict[str, Callable[[MegatronPolicy, Path], Any]] = {
    # First: on the CPU a load borrows the storages, which cannot be emptied then.
    "moving": move,
    "a step": lambda policy, root: train(policy, [7]),
    "the reference policy": lambda policy, root: policy.reference_logprobs(batch(policy)),
    "a step in parts": take_a_step_in_parts,
    "the parameters by name": write_to_parameters,
    "a load": lambda policy, root: policy.load_checkpoint(**paths(root / "first")),
    "another save": lambda policy, root: policy.save_checkpoint(**paths(root / "another")),
    "the end of the save": lambda policy, root: policy.finalize_async_save(),
}


def save_and_change(config: dict[str, Any], root: Path, changes: list[str]) -> None:
    """After each of the changes the save before it is of what the policy was then."""
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        policy.memory = policy._session.memory = DeviceMemory(
            policy._engine,
            policy._session.state,
            move=True,
            settle=policy._session.settle,
            still=policy._engine.pending_reads.wait,
        )
        policy.accumulator._memory = policy.memory
        train(policy, [0])
        policy.save_checkpoint(**paths(root / "first"))
        for number, name in enumerate(changes):
            train(policy, [number])
            before, saved = prints(everything_of(policy)), live(policy)
            with held_up(policy) as hold:
                policy.save_checkpoint(**paths(root / name))
                read_in_every_way(policy)
                assert not hold.released.is_set(), f"{name}: reading has waited"
                CHANGES[name](policy, root)
                assert hold.released.is_set(), f"{name} did not wait"
            assert hold.then == saved, f"{name}: changed before it waited"
            policy.load_checkpoint(**paths(root / name))
            assert differing(prints(everything_of(policy)), before) == [], name


def run(
    ranks: RankPool, checkpoint: Callable[..., Path], name: str, function: Any, *args: Any
) -> None:
    family, tied, where = LAYOUTS[name]
    config = config_of(checkpoint(family, tied=tied, **SIZES), where.megatron, ASYNC)
    ranks.run(where.world, function, config, *args)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_changes_or_moves_memory_waits_for_the_copies_and_reading_does_not(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    changes = [*CHANGES][: None if LAYOUTS[name][1] else 3]
    run(ranks, checkpoint, name, save_and_change, tmp_path, changes)


def interrupt(config: dict[str, Any], root: Path) -> None:
    """A save is whole after somebody has interrupted the wait for its copies."""
    waits = []

    def interrupted(wait: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(copies: Any) -> None:
            waits.append(copies)
            if len(waits) == 1:
                raise KeyboardInterrupt
            wait(copies)

        return call

    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, [0])
        before = prints(everything_of(policy))
        with held_up(policy) as hold:
            policy.save_checkpoint(**paths(root))
            with replaced(writing.Staging, "wait", interrupted):
                with pytest.raises(KeyboardInterrupt):
                    train(policy, [1])
                assert not hold.released.is_set()
                train(policy, [2])
        policy.load_checkpoint(**paths(root))
        assert differing(before, prints(everything_of(policy))) == []


@pytest.mark.nightly
def test_who_interrupts_the_wait_for_the_copies_waits_in_the_next_step(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    run(ranks, checkpoint, "routers with biases", interrupt, tmp_path)


def fail_to_copy(config: dict[str, Any], root: Path) -> None:
    """A copy that fails on rank 1 fails the save on this one at the next call."""

    def failing(copy: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            raise RuntimeError("the device has failed")

        return call if policy.rank == 1 else copy

    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, [0])
        policy.save_checkpoint(**paths(root))
        policy.finalize_async_save()
        train(policy, [1])
        with replaced(writing, "_copy", failing):
            policy.save_checkpoint(**paths(root))
            train(policy, [2])  # which does not wait forever
            with pytest.raises(CheckpointError, match="the device has failed"):
                policy.finalize_async_save()
        dist.barrier()  # rank 0, which removes what was written, has raised as well
        assert [each for at in paths(root).values() for each in leftovers(at)] == []
        assert [each.name for each in (root / "weights").glob("iter_*")] == ["iter_0000001"]
        dist.barrier()
        policy.save_checkpoint(**paths(root))
        policy.finalize_async_save()
        assert policy.load_checkpoint(**paths(root)).step == 3


@pytest.mark.nightly
def test_a_copy_that_fails_fails_the_save_on_all_ranks_at_the_next_call(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    run(ranks, checkpoint, "TP2, tied", fail_to_copy, tmp_path)
