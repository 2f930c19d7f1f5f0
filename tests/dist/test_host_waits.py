"""In the backward pass of a packed step the host asks for no value of a tensor, nor where gradients
are reduced and parameters gathered meanwhile. On a GPU it would wait for it.
`tests/unit/test_fake_device.py` has the forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.engines.megatron import optimizer
from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LENGTH, OVERLAPPED, SIZES, VOCAB, layout
from tests.dist.shortcuts import packed
from tests.fake_device.waits import place_of, waits
from tests.losses import SequenceNLL, TokenNLL

DDP = "DistributedDataParallelConfig"
PACKED = packed(20)
RECOMPUTED = {"activation_checkpointing": True}
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2+SP, recomputed": (2, layout(2, tp=2, sequence_parallel=True).megatron | RECOMPUTED),
    "CP2": (2, layout(2, context_parallel_size=2).megatron),
    "PP2xVPP2": (2, layout(2, pp=2, vpp=2).megatron),
    "DP2": (2, layout(2).megatron),
    "DP2, distributed optimizer, overlaps": (2, layout(2, **OVERLAPPED).megatron),
    "DP2xPP2, distributed optimizer, overlaps": (4, layout(4, pp=2, **OVERLAPPED).megatron),
}
IN_PYTHON = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__}
"""What torch does for tensors on the CPU without an operator that could be seen."""


def in_backward() -> bool:
    """Whether autograd is running this thread."""
    return torch._C._current_graph_task_id() != -1


class Operators(TorchDispatchMode):
    """Notes the places of operators that would wait, `when` they count."""

    def __init__(self, found: set[str], when: Callable[[], bool]) -> None:
        super().__init__()
        self.found, self.when = found, when

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.when() and waits(func, args, kwargs or {}):
            self.found.add(place_of(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """The same for methods of tensors."""

    def __init__(self, found: set[str], when: Callable[[], bool]) -> None:
        super().__init__()
        self.found, self.when = found, when

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.when() and func in IN_PYTHON:
            self.found.add(place_of(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class ReadingLoss(SequenceNLL):
    """Reads a gradient when it has it."""

    def __call__(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(data, *args, **kwargs)
        loss.register_hook(self.read)
        return loss, metrics

    def read(self, gradient: torch.Tensor) -> None:
        assert gradient.tolist() != gradient.item() + 1


def places(
    config: dict[str, Any],
    loss: type,
    when: Callable[[], bool] = in_backward,
    nan_checks: bool = False,
) -> set[str]:
    """Where the host would wait in the backward passes of two steps: the second gathers what the
    first has made. With `nan_checks`, Megatron-Core looks for NaNs before it reduces.
    """
    found: set[str] = set()
    data = oracle.make_batch(8, LENGTH, VOCAB, seed=5)
    with ExitStack() as stack:
        if nan_checks:
            stack.enter_context(mock.patch.object(optimizer, DDP, checking_for_nan))
        policy = stack.enter_context(open_policy(config, init_reference_model=False))
        own = data.shard_by_batch_size(policy.topology.dp, batch_size=8)[policy.coords.dp]
        stack.enter_context(Operators(found, when))
        stack.enter_context(Methods(found, when))
        for _ in range(2):
            policy.train(own, loss())
    return found


def checking_for_nan(**settings: Any) -> Any:
    return DistributedDataParallelConfig(**settings | {"check_for_nan_in_grad": True})


def always() -> bool:
    return True


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("loss", [SequenceNLL, TokenNLL])
def test_no_value_is_read_in_a_backward_pass(ranks, checkpoint, name: str, loss: type) -> None:
    world, megatron = DENSE[name]
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, **PACKED)
    assert ranks.run(world, places, config, loss) == [set()] * world


def of_buffers(found: set[str]) -> set[str]:
    """Those where Megatron-Core reduces and checks gradients, or gathers parameters."""
    modules = ("megatron/core/distributed/", "megatron/core/rerun_state_machine.py")
    return {place for place in found if place.startswith(modules)}


@pytest.mark.parametrize("nan_checks", [False, True])
def test_reductions_and_gathering_that_overlap_read_no_value(ranks, checkpoint, nan_checks) -> None:
    """Forward, where parameters are gathered, or backward, where gradients are reduced."""
    config = policy_config(checkpoint("qwen2", **SIZES), layout(2, **OVERLAPPED).megatron, **PACKED)
    for when in (in_backward, always):
        for found in ranks.run(2, places, config, SequenceNLL, when, nan_checks):
            assert bool(of_buffers(found)) == nan_checks


@pytest.mark.nightly
def test_reading_a_gradient_is_found(ranks, checkpoint) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, **PACKED)
    assert ranks.run(1, places, config, ReadingLoss) == [{"tests/dist/test_host_waits.py read"}]


def test_experts_read_how_many_tokens_they_get(ranks, checkpoint) -> None:
    """And nothing else, where their forward pass is done again in the backward pass."""
    megatron = EXPERT_LAYOUTS["EP2"].megatron | RECOMPUTED
    path = checkpoint("qwen3_moe", layers=2, hidden=32, ffn=32, vocab=VOCAB)
    for found in ranks.run(2, places, policy_config(path, megatron, **PACKED), SequenceNLL):
        modules = {place.split()[0] for place in found}
        assert modules <= {
            "megatron/core/transformer/moe/token_dispatcher.py",
            "megatron/core/transformer/moe/experts.py",
            "megatron/core/transformer/moe/moe_utils.py",  # before 0.19
        }
