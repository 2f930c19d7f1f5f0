"""Refits of a real vLLM that has requests under way, and what it has cached of weights before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.exact import ROOM, furthest
from tests.vllm.engines import EngineCaller, EngineError, options_of
from tests.vllm.sessions import SIZES
from tests.vllm.trainers import BUFFER, Damaging, Trainer, exact_of, info_of, send, weights_of

PROMPTS = torch.randint(256, (4, 40), generator=torch.Generator().manual_seed(9)).tolist()
LONG, TIMEOUT_S = 1500, 60.0
MORE, HELD_S = 40, 300.0
"""Tokens of each request that are drawn while weights arrive, and how long they may take."""
LAST = "model.layers.1.mlp.down_proj.weight"
MIDDLE = "model.layers.1.self_attn.k_proj.weight"


@dataclass
class Asked:
    """An engine with requests under way, and the weights of its steps."""

    caller: EngineCaller
    address: str
    paths: dict[int, Path]

    def call(self, method: str, *arguments: Any) -> Any:
        return self.caller.call("engine", method, *arguments)

    def refit(self, step: int, *how: str) -> None:
        self.caller.begin("engine", "receive_stream", self.address, *how)
        send(weights_of(self.paths[step]), IpcStream(self.address, BUFFER), step)
        assert self.caller.result() == step

    def ask(self, count: int) -> None:
        """Requests for each prompt, each of which has a few tokens and is not complete."""
        sampling = {"max_tokens": count, "min_tokens": count, "seed": 4, "temperature": 1.0}
        self.caller.call("ask", PROMPTS, **sampling)
        while min(self.caller.call("tokens")) < 5:
            time.sleep(0.01)
        assert self.caller.call("under_way") == len(PROMPTS)

    def check(self, prompt: list[int], done: dict[str, Any]) -> list[int]:
        """Every token was drawn by the weights that are said to have drawn it; their steps."""
        steps = done["steps"]
        own = torch.tensor(done["logprobs"])
        assert len(steps) == len(own) == len(done["token_ids"]) and steps == sorted(steps)
        for step in set(steps):
            exact = exact_of(self.paths[step], [prompt + done["token_ids"]])
            drawn = torch.tensor([each == step for each in steps])
            right = exact.value[0, len(prompt) - 1 :]
            assert furthest(own[drawn], right[drawn]) <= ROOM * exact.rounding, step
            if len(set(steps)) > 1:
                wrong = furthest(own[~drawn], right[~drawn])
                assert wrong > 100 * ROOM * exact.rounding, "it would not be seen"
        return sorted(set(steps))


@pytest.fixture(scope="module")
def paths(checkpoint: Callable[..., Path]) -> dict[int, Path]:
    sizes = SIZES | {"max_position": 2048}
    return {step: checkpoint("qwen2", seed=step, **sizes) for step in (1, 2)}


@pytest.fixture
def asked(engine: Callable[..., str], paths: dict[int, Path], tmp_path: Path) -> Iterator[Asked]:
    address = engine(paths[1], module="async_process", block_size=32, max_model_len=2048)
    with EngineCaller(address) as caller:
        asked = Asked(caller, f"ipc://{tmp_path}/s", paths)
        asked.call("prepare", info_of(weights_of(paths[1])), TIMEOUT_S, False)
        asked.refit(1)
        yield asked


@pytest.mark.parametrize("how", ["keep", "abort", "wait"])
def test_requests_are_computed_by_one_version_and_then_by_the_next(asked: Asked, how: str) -> None:
    asked.ask(LONG if how != "wait" else 150)
    asked.refit(2, how)
    asked.caller.call("ask", PROMPTS[:1], max_tokens=5, min_tokens=5, temperature=1.0)
    *begun, later = asked.caller.call("completions")
    assert asked.check(PROMPTS[0], later) == [2]
    steps = [asked.check(prompt, done) for prompt, done in zip(PROMPTS, begun, strict=True)]
    assert steps == [[1, 2] if how == "keep" else [1]] * len(PROMPTS)
    complete = {"keep": "length", "abort": "abort", "wait": "length"}[how]
    assert {done["finish_reason"] for done in begun} == {complete}
    if how == "keep":
        assert {len(done["token_ids"]) for done in begun} == {LONG}
        assert len({done["steps"].index(2) for done in begun}) <= 2, "all at the same time"


def test_tokens_that_are_read_late_have_the_step_of_the_weights_that_drew_them(
    asked: Asked,
) -> None:
    asked.ask(LONG)
    asked.caller.call("hold", True)
    time.sleep(0.2)  # more are drawn meanwhile
    asked.refit(2)
    asked.caller.call("hold", False)
    for prompt, done in zip(PROMPTS, asked.caller.call("completions"), strict=True):
        assert asked.check(prompt, done) == [1, 2]


@pytest.mark.parametrize("by", ["stream to 1", "group to 2"])
def test_requests_are_answered_while_weights_arrive(
    engine: Callable[..., str], paths: dict[int, Path], tmp_path: Path, by: str
) -> None:
    """They come when a part has arrived; the trainer sends the rest when each has some tokens."""
    several = {"tensor_parallel_size": 2} if by == "group to 2" else {}
    address = engine(paths[1], module="async_process", block_size=32, max_model_len=2048, **several)
    held: list[int] = []

    def wait(name: str) -> None:
        if name == MIDDLE:
            # Without a seed: see docs/vllm.md.
            caller.call("ask", PROMPTS, max_tokens=LONG, min_tokens=LONG, temperature=1.0)
            while min(now := caller.call("tokens")) < MORE:
                time.sleep(0.01)
            held.extend(now)

    with EngineCaller(address) as caller, reserved_port() as port:
        asked = Asked(caller, f"ipc://{tmp_path}/s", paths)
        asked.call("prepare", info_of(weights_of(paths[1])), HELD_S, True)
        to: Any = IpcStream(asked.address, BUFFER)
        receive: tuple[str, ...] = ("receive_stream", asked.address)
        if by == "group to 2":
            trainer = Trainer(weights_of(paths[1]), HELD_S)
            group = Collective.join(trainer, "127.0.0.1", port, 3, timeout_s=HELD_S)
            asked.call("join", 1, "127.0.0.1", port, 3, None, group.secret)
            to, receive = group.transport(BUFFER), ("receive_group",)
        for step in (1, 2):
            caller.call("begin_engine", *receive)
            during = wait if step == 2 else lambda name: None
            send(weights_of(paths[step]), to, step, HELD_S, during)
            assert caller.call("end_engine") == step
        caller.call("ask", PROMPTS[:1], max_tokens=5, min_tokens=5, temperature=1.0)
        *begun, later = caller.call("completions")
        if by == "group to 2":
            group.close()
    assert asked.check(PROMPTS[0], later) == [2]
    for count, prompt, done in zip(held, PROMPTS, begun, strict=True):
        assert asked.check(prompt, done)[0] == 1 and count >= MORE
        assert set(done["steps"][:count]) == {1}


@pytest.mark.parametrize("by", ["refit", "probe"])
def test_requests_wait_while_weights_are_mixed(asked: Asked, by: str) -> None:
    """By a refit that was refused, or because a probe says so."""
    asked.ask(LONG)
    if by == "probe":
        asked.call("mark_mixed")
    else:
        asked.caller.begin("engine", "receive_stream", asked.address)
        with pytest.raises(Exception, match="wrong digest"):
            damaged = Damaging(IpcStream(asked.address, BUFFER), LAST)
            send(weights_of(asked.paths[2]), damaged, 2)
        with pytest.raises(EngineError, match=r"RefitError.*wrong digest"):
            asked.caller.result()
    assert asked.call("state") == (1, True)
    with pytest.raises(EngineError, match=r"RefitError: vLLM's weights are mixed"):
        asked.call("logprobs", PROMPTS)
    time.sleep(1.0)
    assert asked.caller.call("under_way") == len(PROMPTS)
    asked.refit(2)
    for prompt, done in zip(PROMPTS, asked.caller.call("completions"), strict=True):
        assert asked.check(prompt, done) == [1, 2]


@pytest.mark.parametrize("forgetting", [True, False])
def test_nothing_is_read_from_the_cache_that_old_weights_have_computed(
    engine: Callable[..., str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    forgetting: bool,
) -> None:
    """A second request for the same prompt would find the blocks of the first."""
    paths = {step: checkpoint("qwen2", seed=step - 1, **SIZES) for step in (1, 2)}
    address = f"ipc://{tmp_path}/s"
    with EngineCaller(engine(paths[1], **options_of("qwen2"))) as caller:
        caller.call("prepare", info_of(weights_of(paths[1])), TIMEOUT_S, False)
        for step in (1, 2):
            caller.call("forget", forgetting or step == 1)
            caller.begin("receive_stream", address)
            send(weights_of(paths[step]), IpcStream(address, BUFFER), step)
            assert caller.result() == step
            sampled = caller.call("sample", PROMPTS, 4, temperature=1.0)
        caller.call("forget", True)
    exact = exact_of(paths[2], [p + t for p, (t, _) in zip(PROMPTS, sampled, strict=True)])
    drawn = torch.tensor([logprobs for _, logprobs in sampled])
    wrong = furthest(drawn, exact.value[:, -4:])
    assert wrong <= ROOM * exact.rounding if forgetting else wrong > 0.01


def test_requests_of_an_engine_that_is_stepped_by_hand_go_on(
    engine: Callable[..., str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    paths = {step: checkpoint("qwen2", seed=step - 1, **SIZES) for step in (1, 2)}
    address = f"ipc://{tmp_path}/s"
    with EngineCaller(engine(paths[1], **options_of("qwen2"))) as caller:
        caller.call("prepare", info_of(weights_of(paths[1])), TIMEOUT_S, False)
        for step in (1, 2):
            caller.begin("receive_stream", address)
            send(weights_of(paths[step]), IpcStream(address, BUFFER), step)
            assert caller.result() == step
            if step == 1:
                before = caller.call("begin_steps", PROMPTS, 20, 8)
        done = caller.call("end_steps")
    for prompt, count, (tokens, logprobs) in zip(PROMPTS, before, done, strict=True):
        assert 0 < count < len(tokens) == 20
        for step, part in ((1, slice(None, count)), (2, slice(count, None))):
            exact = exact_of(paths[step], [prompt + tokens])
            right = exact.value[0, len(prompt) - 1 :][part]
            assert furthest(torch.tensor(logprobs)[part], right) <= ROOM * exact.rounding, step
