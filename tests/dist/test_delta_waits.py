"""Engines that wait for the next version of a chain take it when it is published, and not before;
if none is, they keep what they have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas.chain import VERSION_MANIFEST, Chain
from megatron_policy.refit.deltas.folder import open_folder
from megatron_policy.refit.receive import disk
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import HfDirectory
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.resuming import replaced
from tests.dist.test_delta_refit import Follower, die, disturb, publish
from tests.dist.test_delta_store import forms_of
from tests.dist.test_detached_refit import SIZES, bits_of
from tests.ranks import RankFailure, RankPool
from tests.refit_engine import Bits, bits

LONG_S, SHORT_S = 600.0, 0.2
NOTHING = f"nothing newer than step 0 for {SHORT_S} s.*keeps the weights it had"


class Waiter(Follower):
    """An engine that waits for the next version, in a thread if it is to be published meanwhile."""

    def wait(self, timeout_s: float = SHORT_S) -> Bits:
        self.receiver.timeout_s = timeout_s
        self.receiver.receive_deltas(self.root, wait=True)
        return bits(self.engine.weights)

    def begin_to_wait(self, pool: ThreadPoolExecutor) -> Future[Bits]:
        """Return when it has looked in vain."""
        looks, looked_twice = iter(range(1, 10**6)), threading.Event()

        def look(read_chain: Callable[..., Any]) -> Callable[..., Any]:
            def act(*args: Any) -> Any:
                if next(looks) == 2:
                    looked_twice.set()
                return read_chain(*args)

            return act

        with replaced(disk, "read_chain", look):
            waiting = pool.submit(self.wait, LONG_S)
            assert looked_twice.wait(LONG_S)
        assert not waiting.done()
        return waiting


def publish_while_an_engine_waits(path: Path, root: Path | str) -> None:
    """Versions that come while it waits, none, and one of which all but the manifest is there."""

    def look_before(publish: Callable[..., Any]) -> Callable[..., Any]:
        def act(to: DeltaDirectory, chain: Chain, *manifest: bytes) -> None:
            there = {**open_folder(root).list_files()}
            there.get(chain.name_delta(chain.newest.number), []).append(VERSION_MANIFEST)
            assert chain.is_complete(there, 1) and not waiter.engine.loads[loads:]
            with pytest.raises(RefitError, match=NOTHING):
                waiter.wait()
            publish(to, chain, *manifest)

        return act

    to, waiter = DeltaDirectory(root, whole_every=3), Waiter(forms_of(path), root)
    with open_policy(policy_config(path, {}), **UNUSED) as policy, ThreadPoolExecutor(1) as pool:
        with pytest.raises(RefitError, match=r"has no chain\.json yet"):
            waiter.wait()
        for number in range(5):
            waiting = waiter.begin_to_wait(pool)
            disturb(policy, number, 0.1)
            policy.refit(to)
            assert waiting.result(LONG_S) == bits_of(policy)
        had, loads = bits(waiter.engine.weights), len(waiter.engine.loads)
        with pytest.raises(RefitError, match=NOTHING):
            waiter.wait()
        for number in (5, 6):
            if number == 6:
                policy.exporter.published.clear()  # all weights, in a new chain
            disturb(policy, number, 0.1)
            with replaced(DeltaDirectory, "_publish", look_before):
                policy.refit(to)
            assert bits(waiter.engine.weights) == had
            had, loads = waiter.wait(LONG_S), len(waiter.engine.loads) + 1
            assert had == bits_of(policy)
        for lose in (waiter.receiver.mark_mixed, waiter.receiver.release):
            lose()
            assert waiter.wait(LONG_S) == had and not waiter.receiver.mixed
        if isinstance(root, Path):
            policy.refit(HfDirectory(root.parent / "whole"))
            with pytest.raises(RefitError, match="call receive_directory"):
                waiter.receiver.receive_deltas(root.parent / "whole", wait=True)


@pytest.mark.parametrize("place", ["directory", "store"])
def test_an_engine_that_waits_takes_the_next_version_when_it_is_complete(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, place: str
) -> None:
    root = tmp_path / "chain" if place == "directory" else "memory://waits"
    ranks.run(1, publish_while_an_engine_waits, checkpoint("qwen2", **SIZES), root)


def test_a_trainer_that_dies_leaves_an_engine_waiting_for_the_next_trainer(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    path, root = checkpoint("qwen2", **SIZES), tmp_path / "chain"
    waiter, phase = Waiter(forms_of(path), root), "before a version is published"
    with ThreadPoolExecutor(1) as pool:
        waiting = waiter.begin_to_wait(pool)
        with pytest.raises(RankFailure, match="died: exit code -9"):
            ranks.run(1, die, path, {}, root, phase, 1, tmp_path)
        had = waiting.result(LONG_S)
        assert had == torch.load(tmp_path / "0.bits") and (tmp_path / "1.bits").exists()
        with pytest.raises(RefitError, match=NOTHING):
            waiter.wait()
        assert bits(waiter.engine.weights) == had
        waiting = waiter.begin_to_wait(pool)
        (seen,) = ranks.run(1, publish, path, {}, root, [200, 201])
        assert waiting.result(LONG_S) in seen
        assert waiter.receive() == seen[-1]
