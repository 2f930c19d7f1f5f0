"""The weights of a policy as vLLM's trainer engines read them: by layers, one tensor at a time; and
the calls by which an engine's update begins, goes on, ends or is given up.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.transfer import WeightTransfer
from megatron_policy.inference.vllm.weight_source import RefitSource, group_by_layer
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import RefitInfo, ServedModel
from megatron_policy.refit.receive.ipc import carry_out
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.protocol import parse_request
from tests.refit_engine import SmallEngine, bits, zeros
from tests.refit_trainer import BUFFER, FORMS, StandIn, weights

GROUPS = [
    ["embed"],
    *([f"layers.{i}.weight"] for i in range(6)),
    ["router.bias", "scale", "norm"],
]


class OneRank(StandIn):
    """With what a source asks besides."""

    def plan(self, names: Any = None, own_stage: bool = False, dtype: Any = None) -> Any:
        return super().plan(names)

    def watch(self, steps: Iterator[Any]) -> Iterator[Any]:
        return steps


def test_layers_are_told_by_the_first_number_and_the_words_before_it() -> None:
    names = ["lm_head.weight", "model.layers.1.mlp.experts.0.w", "model.layers.0.norm"]
    names += ["visual.blocks.0.w", "model.norm.weight", "model.layers.1.mlp.experts.10.w", "mtp.0"]
    assert group_by_layer(names) == [
        ["lm_head.weight"],
        ["model.layers.0.norm"],
        ["model.layers.1.mlp.experts.0.w", "model.layers.1.mlp.experts.10.w"],
        ["visual.blocks.0.w"],
        ["mtp.0"],
        ["model.norm.weight"],
    ]
    assert group_by_layer(["a.w", "b"]) == [["a.w", "b"]] and group_by_layer([]) == []
    assert group_by_layer(["a.b2.w", "3.w", "h10"]) == [["a.b2.w"], ["3.w"], ["h10"]]


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1", "10", "x2"]), min_size=1, max_size=4).map(
        ".".join
    ),
    unique=True,
)


@given(NAMES)
def test_groups_have_every_name_once_and_their_order_is_already_theirs(names: list[str]) -> None:
    groups = group_by_layer(names)
    in_order = [name for group in groups for name in group]
    assert sorted(in_order) == sorted(names)
    assert group_by_layer(in_order) == groups


def test_an_iteration_is_what_was_declared_and_keeps_no_tensor() -> None:
    held = weights(1)
    source = RefitSource(OneRank(held))
    assert [(t.name, t.shape, t.dtype) for t in source.metadata()] == [
        (name, shape, dtype) for name, (shape, dtype) in FORMS.items()
    ]
    assert source.groups() == GROUPS and source.held_names() is None
    for _ in range(2):
        seen: dict[str, Tensor] = {}
        alive: list[weakref.ref[Any]] = []
        for name, tensor in source:
            assert tensor is not None
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1, name  # the one before this
            seen[name] = tensor.clone()
            alive.append(weakref.ref(tensor))
            del tensor
        assert bits(seen) == bits(held)
    assert [names for names, _ in source.iter_groups()] == GROUPS


def test_the_ranks_have_agreed_before_the_last_tensor_is_handed_out() -> None:
    agreed: list[str] = []

    class Watched(OneRank):
        def agree(self, failure: Exception | None) -> None:
            agreed.append("agreed")

    source = RefitSource(Watched(weights(1)))
    pairs = iter(source)
    for _ in range(len(FORMS) - 1):
        next(pairs)
    assert agreed == []
    assert next(pairs)[0] == "norm" and agreed == ["agreed"]
    groups = source.iter_groups()
    for _ in range(len(GROUPS) - 1):
        next(groups)
    assert agreed == ["agreed"]
    next(groups)
    assert agreed == ["agreed"] * 2


def test_holders_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="legal: 'all', 'rank 0', 'stage'"):
        RefitSource(OneRank(weights(1)), held="mine")  # type: ignore[arg-type]


class Worker:
    """vLLM's control plane with one worker, and our engine in it."""

    def __init__(self, expected: Any = None) -> None:
        self.engine = SmallEngine(zeros(FORMS))
        self.receiver = Receiver(self.engine.load, expected=expected)
        self.calls: list[str] = []
        self.active = False
        self._assembler = self.receiver.assembler()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.active:
            raise RuntimeError("a weight update is already active")
        self.active, self._assembler = True, self.receiver.assembler()

    def update_weights(self, update_info: dict[str, str]) -> None:
        self.calls.append(next(iter(update_info)))
        if not self.active:
            raise RuntimeError("nothing was started")
        self.active = False  # until it has succeeded
        if "gave_up" in update_info:
            raise RefitError(update_info["gave_up"])
        carry_out(parse_request(update_info["request"].encode()), self._assembler)
        self.active = True

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")
        self.active = False


def send(worker: Any, seed: int, **exporter: Any) -> None:
    deliver(OneRank(weights(seed), **exporter), WeightTransfer(worker, BUFFER), seed)


def test_an_update_is_begun_sent_checked_and_finished_with_its_step() -> None:
    worker = Worker()
    for step in (1, 2):
        worker.calls.clear()
        send(worker, step)
        assert worker.calls[0] == "start" and worker.calls[-1] == f"finish {step}"
        assert set(worker.calls[1:-1]) == {"request"} and len(worker.calls) > 5
        assert bits(worker.engine.weights) == bits(weights(step))
    assert not worker.active


def test_what_an_engine_is_to_expect_is_plain_and_refused_before_it_is_sent() -> None:
    exporter = OneRank(weights(1), model=ServedModel({"rope_theta": 5.0}))
    info = WeightTransfer(None).init_info(exporter, staged=False)  # type: ignore[arg-type]
    assert info["model"] == {"hf_config_overrides": {"rope_theta": 5.0}} and not info["staged"]
    assert info["tensors"]["norm"] == ["bfloat16", [33]]
    worker = Worker(RefitInfo({**FORMS, "norm": ((34,), torch.bfloat16)}))
    with pytest.raises(RefitError, match=r"vLLM could not take the weights: .*norm"):
        send(worker, 1)
    assert worker.calls == ["start", "request", "request"][: len(worker.calls)]
    assert not worker.engine.loads and not worker.active


def test_a_trainer_that_fails_gives_its_update_up_and_the_next_one_is_whole() -> None:
    worker = Worker()

    def fail(name: str) -> None:
        if name == "layers.4.weight":
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        send(worker, 1, during=fail)
    assert worker.calls[-1] == "gave_up" and not worker.active
    assert not worker.engine.loads
    send(worker, 2)
    assert bits(worker.engine.weights) == bits(weights(2))


def test_the_update_of_a_trainer_that_is_gone_is_ended_by_the_next() -> None:
    worker = Worker()
    worker.start_weight_update()
    worker.calls.clear()
    send(worker, 3)
    assert worker.calls[:3] == ["start", "gave_up", "start"]
    assert bits(worker.engine.weights) == bits(weights(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("start_weight_update", "vLLM did not begin a weight update within"),
        ("update_weights", "vLLM did not take the weights within"),
        ("finish_weight_update", "vLLM did not finish the weight update within"),
    ],
)
def test_an_engine_that_does_not_return_is_waited_for_no_longer_than_the_timeout(
    call: str, words: str
) -> None:
    worker, over = Worker(), threading.Event()

    def wait(*ignored: Any) -> None:
        over.wait(60)

    setattr(worker, call, wait)
    try:
        to = WeightTransfer(worker, BUFFER)
        with pytest.raises(RefitError, match=words):
            deliver(OneRank(weights(1), timeout_s=0.4), to, 1)
        worker.calls.clear()
        with pytest.raises(RefitError, match=r"has still not returned .*: restart the engine"):
            deliver(OneRank(weights(2), timeout_s=0.4), to, 2)
        assert not worker.calls
    finally:
        over.set()


def test_only_rank_0_needs_a_client() -> None:
    with pytest.raises(RefitError, match="give WeightTransfer one"):
        send(None, 1)


def test_a_client_that_times_out_itself_is_quoted() -> None:
    worker = Worker()

    def refuse() -> None:
        raise TimeoutError("its own 300 s")

    step: Callable[[], None] = refuse
    worker.start_weight_update = step  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="vLLM could not begin a weight update: its own 300 s"):
        send(worker, 1)
