"""In the backward pass of a packed step the host asks for no value of a tensor. On a GPU it would
wait for it. `tests/unit/test_fake_device.py` has the forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LENGTH, SIZES, VOCAB, layout
from tests.fake_device.waits import place_of, waits
from tests.losses import SequenceNLL, TokenNLL

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 20}}
RECOMPUTED = {"activation_checkpointing": True}
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2+SP, recomputed": (
        2,
        layout(2, tp=2, sequence_parallel=True).megatron | RECOMPUTED,
    ),
    "CP2": (2, layout(2, context_parallel_size=2).megatron),
    "PP2xVPP2": (2, layout(2, pp=2, vpp=2).megatron),
}
IN_PYTHON = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__}
"""What torch does for tensors on the CPU without an operator that could be seen."""


def in_backward() -> bool:
    """Whether autograd is running this thread."""
    return torch._C._current_graph_task_id() != -1


class Operators(TorchDispatchMode):
    """Notes the places of operators that would wait."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if in_backward() and waits(func, args, kwargs or {}):
            self.found.add(place_of(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """The same for methods of tensors."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if in_backward() and func in IN_PYTHON:
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


def places(config: dict[str, Any], loss: type) -> set[str]:
    """Where the host would wait in the backward passes of a step."""
    found: set[str] = set()
    data = oracle.make_batch(8, LENGTH, VOCAB, seed=5)
    with open_policy(config, init_reference_model=False) as policy, ExitStack() as stack:
        own = data.shard_by_batch_size(policy.topology.dp, batch_size=8)[policy.coords.dp]
        stack.enter_context(Operators(found))
        stack.enter_context(Methods(found))
        policy.train(own, loss())
    return found


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("loss", [SequenceNLL, TokenNLL])
def test_no_value_is_read_in_a_backward_pass(
    ranks: Any, checkpoint: Callable[..., Path], name: str, loss: type
) -> None:
    world, megatron = DENSE[name]
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, **PACKED)
    assert ranks.run(world, places, config, loss) == [set()] * world


def test_reading_a_gradient_is_found(ranks: Any, checkpoint: Callable[..., Path]) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, **PACKED)
    assert ranks.run(1, places, config, ReadingLoss) == [{"tests/dist/test_host_waits.py read"}]


def test_experts_read_how_many_tokens_they_get(ranks: Any, checkpoint: Callable[..., Path]) -> None:
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
