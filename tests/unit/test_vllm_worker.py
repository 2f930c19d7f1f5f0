"""What vLLM's workers answer, and what is read from it; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.worker import (
    RefitExtension,
    make_plain,
    read_answers,
    read_state,
    read_step,
)

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
