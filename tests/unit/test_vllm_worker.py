"""What vLLM's workers answer, and what is read from it; vLLM itself is not needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.answers import read_answers, read_state, read_step
from megatron_policy.inference.vllm.async_engine import AsyncVllmEngine
from megatron_policy.inference.vllm.engine import VllmEngine
from megatron_policy.inference.vllm.worker import RefitExtension, make_plain
from megatron_policy.refit.deltas.chain import MANIFEST, Chain

INFO = {"a": ((2, 3), torch.bfloat16)}


class Worker(RefitExtension):
    """A stand-in for vLLM's worker with number 1."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(
            get_model=torch.nn.Module, reset_lora_state=lambda: None
        )
        self.vllm_config = None


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    return Worker()


def test_a_worker_that_is_not_prepared_says_so(worker: Worker) -> None:
    asked: tuple[Any, ...] = (
        worker.refit_from_stream(["ipc:///a", "ipc:///b"]),
        worker.refit_join(1, "127.0.0.1", 1, 3, None, "0" * 64),
        worker.refit_from_directory("/absent"),
        worker.refit_drop_handles(),
    )
    for answer in asked:
        with pytest.raises(RefitError, match=r"worker 0: prepare .*refit_prepare first"):
            read_answers([answer])
    assert worker.refit_state() == (None, False, None)


def test_a_worker_without_a_sender_of_its_own_is_refused(worker: Worker) -> None:
    assert read_answers([worker.refit_prepare(make_plain(INFO))]) == [None]
    for addresses, words in (
        ({"GPU-7": "ipc:///a"}, r"no training rank sends to the device .* of vLLM's worker 1"),
        (["ipc:///a"], "vLLM's worker 1 has no address: 1 are given"),
        ("ipc:///a", "vLLM's worker 1 has no address: 1 are given"),
    ):
        with pytest.raises(RefitError, match=words):
            read_step([worker.refit_from_stream(addresses)])


def test_what_is_no_refit_is_refused(worker: Worker) -> None:
    worker.refit_prepare(make_plain(INFO))
    for answer, words in (
        (worker.refit_from_handles("{}"), "sent weights for"),
        (worker.refit_from_handles("?"), "cannot be read"),
        (worker.refit_finish_handles("?"), "the manifest cannot be read"),
        (worker.refit_from_directory("/absent"), "is not a directory"),
        (worker.refit_join(9, "127.0.0.1", 1, 3, None, "0" * 64), "rank 10 is not an engine's"),
    ):
        with pytest.raises(RefitError, match=words):
            read_answers([answer])
    assert worker.refit_state() == (None, False, None)


def test_weights_arrive_beside_what_is_computed_where_that_cannot_wait_forever(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins(staged: bool, method: str) -> bool:
        worker.refit_prepare(make_plain(INFO), 1.0, staged)
        (begun,) = read_answers([worker.refit_begin(method, [])])
        return bool(begun)

    assert not begins(False, "refit_from_group")
    assert begins(True, "refit_from_group")  # and refuses it: it is in no group
    assert "call refit_join first" in worker.refit_switch()["refused"]
    monkeypatch.setattr(device, "is_accelerated", lambda: True)
    assert not begins(True, "refit_from_group")


def test_the_answers_of_all_workers_are_read() -> None:
    fine, other, refused = {"value": (3, None)}, {"value": (4, None)}, {"refused": "it is damaged"}
    assert read_step([fine, fine]) == 3
    with pytest.raises(RefitError, match=r"different weights: \[\(3, None\), \(4, None\)\]"):
        read_step([fine, other])
    with pytest.raises(RefitError, match="different weights"):
        read_step([{"value": [3, ["a", 7]]}, {"value": [3, ["a", 8]]}])
    with pytest.raises(RefitError, match="worker 1: it is damaged; vLLM's worker 2: it is damaged"):
        read_answers([fine, refused, refused])
    assert read_state([(3, False, None), (3, False, None)]) == (3, False)
    assert read_state([(3, False, None), (3, True, None)]) == (3, True)
    assert read_state([(3, False, None), (4, False, None)]) == (None, True)
    assert read_state([(3, False, ["a", 7]), (3, False, ["a", 8])]) == (3, True)


CHAIN = Chain.begin("0" * 16, 3)


class Llm:
    """A stand-in for vLLM's `LLM` and `AsyncLLM` with two workers, of which it says which versions
    they have.
    """

    def __init__(self, held: list[Any], timeout_s: float = 600.0) -> None:
        self.held, self.timeout_s, self.calls = held, timeout_s, list[str]()
        config = SimpleNamespace(is_multimodal_model=False)
        parallel = SimpleNamespace(data_parallel_size=1)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    def collective_rpc(self, method: str, args: Any = ()) -> Any:
        self.calls.append(method)
        if method == "refit_held_version":
            return [{"value": [held, self.timeout_s]} for held in self.held]
        if method == "refit_state":
            return [(3, False, None)]
        if method == "refit_begin":
            return [{"value": False}] * 2
        return [{"value": (3, None)}] * 2

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.calls.append("forget")


class AsyncLlm(Llm):
    async def collective_rpc(self, method: str, args: Any = ()) -> Any:
        return super().collective_rpc(method, args)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


def test_an_engine_waits_for_a_version_that_not_all_of_its_workers_have(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(CHAIN.encode())
    own, older = [CHAIN.name, 0], ["1" * 16, 0]
    for held in ([own, own], [own, older], [older, older], [own, None], [None, None]):
        llm = Llm(held, timeout_s=0.1)
        if held == [own, own]:
            with pytest.raises(RefitError, match=r"newer than step 3 for 0.1 s.* keeps the"):
                VllmEngine(llm).receive_deltas(str(tmp_path), wait=True)
            assert llm.calls == ["refit_held_version"]
        else:
            assert VllmEngine(llm).receive_deltas(str(tmp_path), wait=True) == 3
            begins = ["refit_find_deltas", "refit_begin"]
            assert llm.calls[1:] == [*begins, "refit_from_deltas", "forget"]


def test_an_engine_answers_requests_while_it_waits(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(CHAIN.encode())
    llm = AsyncLlm([[CHAIN.name, 0]] * 2)

    async def wait() -> int:
        receiving = asyncio.create_task(
            AsyncVllmEngine(llm).receive_deltas(str(tmp_path), wait=True)
        )
        await asyncio.sleep(0.1)
        assert llm.calls == ["refit_held_version"]
        (tmp_path / "new").write_bytes(CHAIN.with_delta(4, "f" * 16).encode())
        (tmp_path / "new").replace(tmp_path / MANIFEST)
        return await receiving

    assert asyncio.run(wait()) == 3
    begins = ["refit_find_deltas", "refit_begin", "pause"]
    assert llm.calls[1:] == [*begins, "refit_from_deltas", "refit_state", "resume"]
