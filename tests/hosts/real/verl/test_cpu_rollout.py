"""The laptop's rollout between updates of its weights: verl aborts all requests and resumes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.workers.rollout.replica import TokenOutput

from examples.verl.cpu_rollout import Replica, Server
from tests.exact import load_hf

PROMPT, LONGEST = [5, 9, 23, 7], 6
GREEDY = {"temperature": 0}


class Handle:
    """A server as verl's replicas call it in a Ray actor."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._server, name))


class Rollout:
    """verl's own replica of a server with the weights of step 3, and requests to the server."""

    def __init__(self, model: Path) -> None:
        self.server = Server(str(model), 0, LONGEST)
        self.server.load([(name, each) for name, each in load_hf(model).named_parameters()])
        self.server.loaded(3)
        self.replica = object.__new__(Replica)
        self.replica.servers = [Handle(self.server)]

    def ask(self) -> asyncio.Task[TokenOutput]:
        return asyncio.create_task(self.server.generate(PROMPT, GREEDY, "request"))


async def until_it_waits(task: asyncio.Task[Any]) -> None:
    """Run `task` until it cannot go on alone."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()


@pytest.fixture(scope="module")
def wanted(qwen2: Path) -> list[int]:
    hf = load_hf(qwen2)
    found = hf.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=LONGEST)
    return found[0, len(PROMPT) :].tolist()


def test_requests_that_wait_are_sent_back_and_later_ones_wait_until_generation_resumes(
    qwen2: Path, wanted: list[int]
) -> None:
    async def run() -> tuple[TokenOutput, TokenOutput]:
        rollout = Rollout(qwen2)
        early = rollout.ask()
        await until_it_waits(early)
        await rollout.replica.abort_all_requests()
        assert early.done()
        late = rollout.ask()
        await until_it_waits(late)
        await rollout.replica.resume_generation()
        return await early, await late

    early, late = asyncio.run(run())
    assert (early.stop_reason, early.token_ids) == ("aborted", [])
    assert early.extra_fields == late.extra_fields == {"global_steps": 3}
    assert (late.stop_reason, late.token_ids) == ("completed", wanted)


def test_what_is_being_generated_ends_before_an_abort_returns(
    qwen2: Path, wanted: list[int]
) -> None:
    async def run() -> TokenOutput:
        rollout = Rollout(qwen2)
        task = rollout.ask()
        await until_it_waits(task)
        while rollout.server._waiting:
            await asyncio.sleep(0)
        await rollout.replica.abort_all_requests()
        assert task.done()
        return await task

    assert asyncio.run(run()).token_ids == wanted


def test_a_replica_that_leaves_sends_new_requests_back(qwen2: Path) -> None:
    async def run() -> tuple[TokenOutput, TokenOutput]:
        rollout = Rollout(qwen2)
        await rollout.server.abort_all_requests(reject_request=True)
        refused = await rollout.ask()
        await rollout.replica.resume_generation()
        return refused, await rollout.ask()

    refused, taken = asyncio.run(run())
    assert (refused.stop_reason, refused.token_ids) == ("aborted", [])
    assert taken.stop_reason == "completed"
