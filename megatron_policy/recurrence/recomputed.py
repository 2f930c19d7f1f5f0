"""Computes something again in the backward pass, which keeps its inputs alone.

Unlike `torch.utils.checkpoint` its inputs are saved tensors, which hooks see, and nothing is done
for random numbers: none are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

Results = TypeVar("Results", torch.Tensor, tuple[torch.Tensor, torch.Tensor])


def recomputed(compute: Callable[..., Results], *inputs: torch.Tensor | None) -> Results:
    """`compute(*inputs)`, differentiable in all inputs. It may use no other tensors that are."""
    apply: Callable[..., Results] = _Recomputed.apply
    return apply(compute, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: torch.Tensor | None) -> Any:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            leaves = [
                x if x is None else x.detach().requires_grad_(need)
                for x, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            computed = ctx.compute(*leaves)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        computed = computed if isinstance(computed, tuple) else (computed,)
        found = iter(torch.autograd.grad(computed, wanted, grads))
        return None, *(next(found) if need else None for need in needed)
