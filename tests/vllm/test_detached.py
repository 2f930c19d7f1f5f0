"""A refit into a real vLLM beside training: the engine computes with the weights of the moment in
which it was begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import oracle
from tests.exact import ROOM, Exact, assert_equal, furthest
from tests.vllm.engines import EngineCaller, options_of
from tests.vllm.sessions import (
    BUFFER,
    FIXED,
    LAYOUTS,
    LENGTH,
    SIZES,
    TIMEOUT_S,
    Session,
    make_config,
)

FIRST = 5
"""Tensors that have been sent when the rest is held up."""


class Held:
    """A transport that goes on after its first tensors when it is let."""

    def __init__(self, inner: IpcStream) -> None:
        self._inner, self._count = inner, 0
        self.holds, self.go_on = threading.Event(), threading.Event()

    def plan(self, exporter: Any) -> Any:
        return self._inner.plan(exporter)

    def open(self, exporter: Any, plan: Any) -> Any:
        session = self._inner.open(exporter, plan)
        if session is not None:
            filled = session.filled

            def held(tensor: Any, target: Any) -> None:
                filled(tensor, target)
                self._count += 1
                if self._count == FIRST:
                    self.holds.set()
                    assert self.go_on.wait(TIMEOUT_S)

            session.filled = held
        return session


def score(policy: MegatronPolicy) -> torch.Tensor:
    rows = BatchedDataDict(
        input_ids=torch.tensor(FIXED), input_lengths=torch.full((len(FIXED),), LENGTH)
    )
    return policy.logprobs(rows)[:, 1:].cpu()


def train_beside(address: str, layout: str, path: Path, folder: Path) -> dict[str, Any]:
    """A step, a refit that takes two more; what both compute. The engine's part is rank 0's."""
    policy = MegatronPolicy(make_config(layout, path), init_reference_model=False)
    try:
        with EngineCaller(address) if policy.rank == 0 else nullcontext() as engine:
            session = Session(policy, engine, 1, folder)
            session.prepare(staged=False)
            session.train()
            policy.export_hf(folder / "then")
            seen: dict[str, Any] = {"then": score(policy)}
            where = f"ipc://{folder}/stream"
            session.begin("receive_stream", [where])
            transport = Held(IpcStream(where, BUFFER))
            policy.begin_refit(transport)
            assert engine is None or transport.holds.wait(TIMEOUT_S)
            session.train()
            session.train()
            transport.go_on.set()
            sent = policy.finish_refit()
            assert sent is not None and sent.step == 1 and policy.steps == 3
            returned = session.result()
            seen["later"] = score(policy)
            if engine is not None:
                seen["said"] = returned, engine.call("state")
                seen["engine"] = torch.tensor(engine.call("logprobs", FIXED))
            return seen
    finally:
        policy.shutdown()


@pytest.mark.parametrize(
    "layout", [pytest.param("tp2", marks=pytest.mark.daily), "pp2", "ep2", "fsdp2"]
)
def test_vllm_computes_with_the_weights_of_the_step_at_which_its_refit_was_begun(
    ranks: Any,
    engine: Callable[..., str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    layout: str,
) -> None:
    world, family, _, _ = LAYOUTS[layout]
    path = checkpoint(family, **SIZES)
    seen, *_ = ranks.run(
        world, train_beside, engine(path, **options_of(family)), layout, path, tmp_path
    )
    tokens = torch.tensor(FIXED)
    exact = Exact.of(tmp_path / "then", lambda model: oracle.hf_logprobs(model, tokens))
    assert seen["said"] == (1, (1, False))
    assert_equal("policy", seen["then"], exact, layout)
    assert_equal("engine", seen["engine"], exact, layout)
    assert furthest(exact.value, seen["later"]) > 100 * ROOM * exact.rounding
