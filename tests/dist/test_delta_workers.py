"""Workers of one vLLM that follow a chain of deltas all take the same version, while the trainer
publishes others. vLLM itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm import worker
from megatron_policy.inference.vllm.answers import read_state, read_step
from megatron_policy.inference.vllm.engine import VllmEngine
from megatron_policy.refit.transports.deltas import DeltaDirectory
from tests.dist.cases import open_policy, policy_config
from tests.dist.resuming import replaced
from tests.dist.test_delta_refit import disturb
from tests.dist.test_detached_refit import SIZES, bits_of, step_on
from tests.ranks import RankPool
from tests.refit_engine import zeros
from tests.vllm_workers import Reload, StubLLM, Worker


def follow_a_trainer_that_publishes_meanwhile(path: Path, root: Path) -> None:
    """Versions that come between what two workers do, of the same step and of the next ones."""
    to = DeltaDirectory(root, whole_every=2)
    config = policy_config(path, {}, precision="bfloat16")
    with (
        replaced(worker, "ModelReload", lambda made: Reload),
        open_policy(config, init_reference_model=False) as policy,
    ):
        forms = policy.exporter.plan(as_stored=True).info()
        llm = StubLLM([Worker(zeros(forms)) for _ in range(2)])
        engine, published = VllmEngine(llm), []
        engine.prepare(forms, staged=True)

        def publish(number: int) -> None:
            disturb(policy, number, 0.02)
            policy.refit(to)
            published.append(bits_of(policy))

        def publish_once(act: Callable[[], object], method: str) -> None:
            if method in ("refit_begin", "refit_from_deltas"):
                llm.between = lambda method: None
                act()

        def receive() -> int:
            step = engine.receive_deltas(str(root))
            assert engine.state() == (step, False)
            return step

        publish(0)
        assert receive() == 0 and llm.served == published * 2
        for number in (1, 2):  # of which some are whole
            publish(2 * number)
            llm.between = partial(publish_once, partial(publish, 2 * number + 1))
            assert receive() == 0 and llm.served == [published[-2]] * 2
        llm.between = partial(publish_once, lambda: (step_on(policy, 8), publish(8)))
        assert receive() == 0 and llm.served == [published[-2]] * 2
        assert receive() == 1 and llm.served == [published[-1]] * 2

        # One refuses: none loads, though the other has received all.
        publish(90)
        (had, _), llm.workers[1].refit_receiver.step = llm.served, 9
        with pytest.raises(
            RefitError, match=r"worker 0: another .* refused.*worker 1: .* are older"
        ):
            receive()
        assert llm.served == [had] * 2
        llm.workers[1].refit_receiver.step = 1
        assert receive() == 1 and llm.served == [published[-1]] * 2

        # Without a version that all take they differ, which is said.
        publish(9)
        llm.between = partial(publish_once, lambda: publish(10))
        with pytest.raises(RefitError, match="have accepted different weights"):
            read_step(llm.collective_rpc("refit_from_deltas", args=(str(root),)))
        assert llm.served == published[-2:]
        assert read_state(llm.collective_rpc("refit_state")) == engine.state() == (1, True)
        assert receive() == 1 and llm.served == [published[-1]] * 2

        # The version that was chosen goes before it is read.
        publish(11)
        (had, _), found = llm.served, llm.collective_rpc("refit_find_deltas", args=(str(root),))
        policy.exporter.published.clear()
        publish(12)
        publish(13)
        answers = llm.collective_rpc("refit_from_deltas", args=(str(root), found[0]["value"]))
        assert all("call again, to receive the newest" in said["refused"] for said in answers)
        assert engine.state() == (1, False) and llm.served == [had] * 2
        assert receive() == 1 and llm.served == [published[-1]] * 2


def test_workers_of_one_engine_take_the_same_version(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", **SIZES, dtype="bfloat16")
    ranks.run(1, follow_a_trainer_that_publishes_meanwhile, path, tmp_path / "chain")
