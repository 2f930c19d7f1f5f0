"""The logits that a loss is given: their numbers, and how many matrices of them are held.

Shapes: S positions, R parallel rows, D model, V vocabulary.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.engines.megatron.head import Head
from megatron_policy.lm_head.fused_tiles import PADDING_LOGIT, HeadShape

S, R, D, V, REAL = 5, 3, 8, 64, 61


class Matrices(TorchDispatchMode):
    """The most fp32 matrices of logits that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            storage = found.untyped_storage()
            if storage.nbytes() >= S * R * V * 4:
                self._held[storage._cdata] = weakref.ref(storage)
        self._held = {key: each for key, each in self._held.items() if each() is not None}
        self.most = max(self.most, len(self._held))
        return found


def head_of(weight_VD: torch.Tensor, shape: HeadShape) -> Head:
    model: Any = SimpleNamespace(
        share_embeddings_and_output_weights=False,
        output_layer=lambda hidden_SRD, weight: (hidden_SRD @ weight_VD.t(), None),
    )
    group: Any = None
    return Head(shape, group, 8, model)


def plainly(products_SRV: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """The logits, each operation by itself."""
    logits_SRV = products_SRV.float() * shape.scale
    if shape.softcap is not None:
        logits_SRV = torch.tanh(logits_SRV / shape.softcap) * shape.softcap
    logits_SRV = logits_SRV / shape.temperature
    return logits_SRV.masked_fill(torch.arange(V) >= shape.real, PADDING_LOGIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(("softcap", "matrices"), [(None, 1), (3.0, 2)])
def test_logits_are_finished_in_place(
    dtype: torch.dtype, temperature: float, scale: float, softcap: float | None, matrices: int
) -> None:
    """With a softcap a second matrix is held: its gradient needs the hyperbolic tangent."""
    random = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(V, D, generator=random).to(dtype).requires_grad_()
    hidden_SRD = torch.randn(S, R, D, generator=random).to(dtype).requires_grad_()
    slope_SRV = torch.randn(S, R, V, generator=random)
    shape = HeadShape(0, REAL, scale=scale, softcap=softcap, temperature=temperature)
    inputs = (hidden_SRD, weight_VD)
    expected = plainly(hidden_SRD @ weight_VD.t(), shape)
    with Matrices() as counted:
        logits_SRV = head_of(weight_VD, shape).logits(hidden_SRD)
    assert counted.most == matrices
    assert torch.equal(logits_SRV, expected)
    found = torch.autograd.grad((logits_SRV * slope_SRV).sum(), inputs)
    assert all(map(torch.equal, found, torch.autograd.grad((expected * slope_SRV).sum(), inputs)))


def test_a_loss_can_change_its_logits_in_place() -> None:
    weight_VD = torch.randn(V, D, requires_grad=True)
    shape = HeadShape(vocab_start=0, real=REAL, softcap=3.0)
    logits_SRV = head_of(weight_VD, shape).logits(torch.randn(S, R, D))
    logits_SRV.div_(2.0).log_softmax(-1)[..., 0].sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.isfinite().all()
