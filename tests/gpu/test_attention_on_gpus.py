"""Attention of packed sequences in one call of torch's kernel: against tiles and fp64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_policy.attention import varlen_attention
from megatron_policy.device import current_device, varlen_kernel
from tests.unit.test_varlen_attention import attention_of, packed_params, states_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("reach", [None, 0, 4, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_call_is_as_exact_as_tiles(dtype: torch.dtype, reach: int | None) -> None:
    kernel = varlen_kernel()
    if kernel is None:
        pytest.skip("neither torch nor the GPU has the kernel")
    counted = mock.Mock(side_effect=kernel)
    with mock.patch.object(varlen_attention, "varlen_kernel", lambda: counted):
        called = differentiated(dtype, reach)
    assert counted.call_count == 1
    with mock.patch.object(varlen_attention, "_DTYPES", ()):
        tiled = differentiated(dtype, reach)
        exact = differentiated(torch.float64, reach, rounded=dtype)
    # A query that sees itself alone has no gradient, nor has its key: their terms of the values'
    # gradient cancel, and leave rounding errors of its size.
    cancelled = exact[-1].norm() if reach == 0 else 0.0
    for ours, theirs, truth in zip(called, tiled, exact, strict=True):
        size = max(truth.norm(), cancelled)
        errors = [float((x.double() - truth).norm() / size) for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-3, errors


def differentiated(
    dtype: torch.dtype, reach: int | None, rounded: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The context and the gradients of the states, which are rounded to one dtype and computed in
    another.
    """
    states = [
        x.detach().to(current_device(), rounded or dtype).to(dtype).requires_grad_()
        for x in states_of(32, 32, 1)
    ]
    context = attention_of(reach)(*states, None, packed_seq_params=packed_params())
    weights = torch.linspace(-1, 1, context.numel(), device=context.device).view_as(context)
    return [context, *torch.autograd.grad((context * weights.to(dtype)).sum(), states)]
