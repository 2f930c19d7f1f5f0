"""Weight gradients that linear layers add to the buffers themselves, as those of Transformer Engine
do, are what autograd hands on otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.losses import SequenceNLL

LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)


class FusedProduct(torch.autograd.Function):
    """Transformer Engine's contract: the gradient is added to `main_grad`, the parameter is marked,
    and what autograd gets has no meaning.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        parameter: Any = ctx.weight
        parameter.main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
        parameter.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)


@contextmanager
def fusing_layers() -> Iterator[list[Any]]:
    """Within this context linear layers are made that can do so, and are listed."""
    made: list[Any] = []
    plainly = layers.linear_with_grad_accumulation_and_async_allreduce

    def product(input: torch.Tensor, weight: torch.Tensor, bias: Any, **others: Any) -> Any:
        (own,) = (each for each in made if each.weight is weight)
        if not (own.fuse_wgrad_accumulation and hasattr(weight, "main_grad")):
            return plainly(input=input, weight=weight, bias=bias, **others)
        found = FusedProduct.apply(input, weight)  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias

    def making(kind: Any) -> Any:
        init = kind.__init__

        def fusing(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.fuse_wgrad_accumulation = False
            made.append(self)

        return mock.patch.object(kind, "__init__", fusing)

    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, product), making(LINEARS[0]), making(LINEARS[1]):
        yield made


def steps(config: dict[str, Any], fused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms of a step at once and of one in three parts, and the weights after them."""
    data = oracle.make_batch(8, LENGTH, VOCAB, seed=2)
    with (
        fusing_layers() if fused else nullcontext([]) as made,
        open_policy(config, init_reference_model=False) as policy,
    ):
        assert fused == bool(made) and all(each.fuse_wgrad_accumulation for each in made)
        norms = [float(policy.train(data, SequenceNLL())["grad_norm"])]
        policy.accumulator.begin(SequenceNLL())
        for start, end in ((0, 2), (2, 3), (3, 8)):
            policy.accumulator.microbatch(data.slice(start, end))
        norms.append(float(policy.accumulator.finish()["grad_norm"]))
        chunk = policy._engine.trainable.chunks[0]
        return norms, {name: p.detach().clone() for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("recomputed", [False, True])
def test_they_are_the_same_at_once_and_in_parts(ranks, checkpoint, recomputed: bool) -> None:
    """The same sums in the same order: to the bit."""
    path = checkpoint("qwen2", **SIZES)
    config = policy_config(path, {"activation_checkpointing": recomputed})
    ((norms, weights),) = ranks.run(1, steps, config, True)
    ((norms_by_autograd, weights_by_autograd),) = ranks.run(1, steps, config, False)
    assert norms == norms_by_autograd
    for name, weight in weights.items():
        assert torch.equal(weight, weights_by_autograd[name]), name
