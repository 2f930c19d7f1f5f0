"""RMS norms round as those of transformers do, and are one kernel where torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron_policy.engines.megatron.layers.norm import RMSNorm
from tests.fake_device.gpu import GPU, NoDeviceInit

SIZE, EPS = 48, 1e-6


def norm_of(dtype: torch.dtype, plus_one: bool) -> RMSNorm:
    config = TransformerConfig(
        num_layers=1, hidden_size=SIZE, num_attention_heads=4, params_dtype=dtype
    )
    return RMSNorm(config, SIZE, EPS, plus_one)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_and_gradients_are_those_of_transformers(
    dtype: torch.dtype, plus_one: bool
) -> None:
    random, shapes = torch.Generator().manual_seed(0), ((7, 3, SIZE), (SIZE,), (7, 3, SIZE))
    values, weight, slope = (torch.randn(*s, generator=random).to(dtype) for s in shapes)
    kind: Any = Gemma2RMSNorm if plus_one else LlamaRMSNorm
    found = []
    for norm in (norm_of(dtype, plus_one), kind(SIZE, EPS).to(dtype)):
        norm.weight.data.copy_(weight)
        x = values.clone().requires_grad_()
        y = norm(x)
        found.append((y, *torch.autograd.grad(y, (x, norm.weight), slope)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)


class Operators(TorchDispatchMode):
    """Names the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(
    torch.version.cuda is None or not hasattr(torch.ops.aten, "_fused_rms_norm"),
    reason="this build of torch has no such kernel",
)
@pytest.mark.parametrize(("plus_one", "others"), [(False, 1), (True, 5)])
def test_a_gpu_computes_it_in_one_kernel(plus_one: bool, others: int) -> None:
    """And multiplies by the weight, which with `plus_one` is in fp32."""
    norm = norm_of(torch.bfloat16, plus_one)
    operators = Operators()
    with NoDeviceInit():
        x = torch.empty(7, 3, SIZE, dtype=torch.bfloat16).to(GPU)
        norm.weight = torch.nn.Parameter(x[0, 0].clone(), requires_grad=False)
        with operators:
            norm(x)
    assert operators.names.count("_fused_rms_norm") == 1
    assert len(operators.names) == 1 + others, operators.names
