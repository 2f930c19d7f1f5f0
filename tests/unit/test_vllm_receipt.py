"""Refits of an engine that goes on answering while weights arrive: it is paused while they are
loaded, and nothing is loaded of a refit that fails, or whose call was given up. vLLM itself is not
needed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm import worker
from megatron_policy.inference.vllm.async_engine import AsyncVllmEngine
from megatron_policy.inference.vllm.engine import VllmEngine
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.refit_engine import zeros
from tests.refit_trainer import BUFFER, FORMS, StandIn
from tests.vllm_workers import BusyLLM, Reload, StubLLM, Worker

LONG_S = 60.0
MIDDLE = "layers.3.weight"
STEPS = 20
"""Of the engine, while a trainer does not go on."""


class Following:
    """An engine that follows trainers over a stream, and what it has computed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.worker = Worker(zeros(FORMS))
        self.llm = BusyLLM([self.worker])
        self.engine = AsyncVllmEngine(self.llm)
        self.address = f"ipc://{folder}/s"
        self.trainers: list[asyncio.Task[Any]] = []

    def refit(self, step: int, during: Callable[[str], None] = lambda name: None) -> None:
        """Begin a trainer's refit, to weights that all have that value."""
        held = {n: torch.full(shape, float(step), dtype=d) for n, (shape, d) in FORMS.items()}
        trainer = StandIn(held, LONG_S, during)
        sends = asyncio.to_thread(deliver, trainer, IpcStream(self.address, BUFFER), step=step)
        self.trainers.append(asyncio.ensure_future(sends))

    def receive(self) -> asyncio.Task[int]:
        """Begin the engine's."""
        return asyncio.ensure_future(self.engine.receive_stream(self.address))

    async def follow(self, step: int) -> None:
        """One refit, on both sides."""
        self.refit(step)
        assert await self.receive() == step
        await self.trainers.pop()

    def count_steps(self) -> None:
        """Return when the engine has computed some more."""
        before, end = len(self.llm.drawn), threading.Event()
        while len(self.llm.drawn) < before + STEPS:
            assert not end.wait(0.001)


@pytest.fixture
def follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Following], Coroutine[Any, Any, None]]], Following]]:
    """Run what an engine does that has weights of step 1 and is prepared with `staged`."""
    monkeypatch.setattr(worker, "ModelReload", Reload)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    made: list[Following] = []

    def run(act: Callable[[Following], Coroutine[Any, Any, None]]) -> Following:
        async def all_of_it() -> None:
            made.append(following := Following(tmp_path))
            await following.engine.prepare(FORMS, LONG_S, staged=True)
            await following.follow(1)
            following.llm.drawn.clear()
            following.llm.paused_at.clear()
            await act(following)

        asyncio.run(all_of_it())
        # A step computes with weights of one version.
        assert all(len(values) == 1 for values in made[-1].llm.drawn)
        return made[-1]

    yield run
    for each in made:
        each.llm.close()


def test_requests_are_answered_while_a_trainer_sends(follow: Any) -> None:
    """It goes on sending only when the engine has computed more steps."""

    async def act(following: Following) -> None:
        def wait(name: str) -> None:
            if name == MIDDLE:
                following.count_steps()

        following.refit(2, wait)
        assert await following.receive() == 2
        await asyncio.to_thread(following.count_steps)

    llm = follow(act).llm
    (paused_at,) = llm.paused_at
    assert paused_at >= STEPS
    assert set().union(*llm.drawn[:paused_at]) == {1.0}
    assert set().union(*llm.drawn[paused_at:]) == {2.0}
    assert len(llm.drawn) >= paused_at + STEPS, "it was resumed"


def test_weights_are_loaded_by_the_thread_that_computes(follow: Any) -> None:
    threads = []

    async def act(following: Following) -> None:
        load = following.worker.engine.load

        def note(weights: Any) -> None:
            threads.append(threading.current_thread())
            load(weights)

        following.worker.refit_model.load = note
        await following.follow(2)

    assert threads == [follow(act).llm._thread]


@pytest.mark.parametrize("how", ["given up", "older"])
def test_an_engine_is_not_paused_for_a_refit_that_does_not_arrive(follow: Any, how: str) -> None:
    async def act(following: Following) -> None:
        def fail(name: str) -> None:
            if name == MIDDLE:
                raise RefitError("the trainer gives up")

        if how == "older":
            following.worker.refit_receiver.step = 9
        following.refit(2, fail if how == "given up" else lambda name: None)
        with pytest.raises(RefitError):
            await following.receive()
        with pytest.raises(RefitError):
            await following.trainers.pop()
        assert await following.engine.state() == (9 if how == "older" else 1, False)
        await asyncio.to_thread(following.count_steps)
        assert not following.llm.paused_at and following.llm.drawn[-1] == {1.0}
        following.worker.refit_receiver.step = 1
        await following.follow(3)

    assert len(follow(act).llm.paused_at) == 1


@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_loaded_of_a_call_that_was_given_up(follow: Any, again: bool) -> None:
    """Unless the same call comes again, which goes on with what has arrived."""

    async def act(following: Following) -> None:
        reached, goes_on = threading.Event(), threading.Event()

        def wait(name: str) -> None:
            if name == MIDDLE:
                reached.set()
                assert goes_on.wait(LONG_S)

        following.refit(2, wait)
        call = following.receive()
        assert await asyncio.to_thread(reached.wait, LONG_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(following.count_steps)
        if again:
            call = following.receive()
            await asyncio.to_thread(following.count_steps)
            goes_on.set()
            assert await call == 2
            await following.trainers.pop()
            return
        goes_on.set()
        with pytest.raises(RefitError, match="vLLM's owner gave up"):
            await following.trainers.pop()
        assert await following.engine.state() == (1, False)
        await asyncio.to_thread(following.count_steps)
        assert not following.llm.paused_at and following.llm.drawn[-1] == {1.0}
        await following.follow(3)

    assert len(follow(act).llm.paused_at) == 1


def test_a_second_refit_waits_for_the_first(follow: Any) -> None:
    async def act(following: Following) -> None:
        calls = [following.receive() for _ in range(2)]
        for step in (2, 3):
            following.refit(step)
            await following.trainers.pop()
        assert [await call for call in calls] == [2, 3]
        await asyncio.to_thread(following.count_steps)
        assert following.llm.drawn[-1] == {3.0}

    assert len(follow(act).llm.paused_at) == 2


def test_an_engine_that_is_prepared_anew_meanwhile_loads_nothing(follow: Any) -> None:
    async def act(following: Following) -> None:
        prepared = threading.Event()

        def wait(name: str) -> None:
            assert name != MIDDLE or prepared.wait(LONG_S)

        following.refit(2, wait)
        call = following.receive()
        await asyncio.to_thread(following.count_steps)
        await following.engine.prepare(FORMS, LONG_S, staged=True)
        again = await following.llm.collective_rpc(
            "refit_begin", ("refit_from_stream", [following.address])
        )
        assert again == [{"value": True}], "it waits"
        prepared.set()
        with pytest.raises(RefitError, match="vLLM was prepared for others"):
            await following.trainers.pop()
        assert await following.engine.state() == (None, False)
        following.refit(3)
        assert await call == 3, "of the receipt that was begun last"
        await following.trainers.pop()

    assert len(follow(act).llm.paused_at) == 1


def test_what_nobody_lets_load_is_refused_in_time(follow: Any) -> None:
    async def act(following: Following) -> None:
        following.worker.refit_receiver.timeout_s = 0.5
        rpc = following.llm.collective_rpc
        await rpc("refit_begin", ("refit_from_stream", [following.address]))
        following.refit(2)
        with pytest.raises(RefitError, match=r"has not let them be loaded within 0\.5 s"):
            await following.trainers.pop()
        (said,) = await rpc("refit_switch")
        assert "keeps the weights it had" in said["refused"]

    assert follow(act).llm.drawn[-1] == {1.0}


def test_an_engine_that_is_called_by_hand_receives_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ModelReload", Reload)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    llm, address = StubLLM([Worker(zeros(FORMS))]), f"ipc://{tmp_path}/s"
    engine = VllmEngine(llm)
    engine.prepare(FORMS, LONG_S, staged=True)
    held = {n: torch.full(shape, 2.0, dtype=d) for n, (shape, d) in FORMS.items()}
    options = {"step": 2}
    sends = threading.Thread(
        target=deliver, args=(StandIn(held), IpcStream(address, BUFFER)), kwargs=options
    )
    sends.start()
    assert engine.receive_stream(address) == 2 and engine.state() == (2, False)
    sends.join()
    (weights,) = [each.engine.weights for each in llm.workers]
    assert all(tensor.eq(2).all() for tensor in weights.values())
