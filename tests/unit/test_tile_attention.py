"""Attention on fused kernels never holds as much as the scores of a whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_policy.engines.megatron.layers.attention import TorchAttention

LENGTH, HEADS, HEAD_DIM = 2048, 4, 8


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.itemsize
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor)
        ]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize(
    ("groups", "values", "reach"),
    [
        (HEADS, HEAD_DIM, None),
        (2, HEAD_DIM, None),
        (HEADS, 5, None),
        (HEADS, 11, None),
        (HEADS, HEAD_DIM, 100),
        (1, HEAD_DIM, 700),
    ],
)
def test_neither_scores_nor_a_mask_of_all_positions_are_ever_held(
    groups: int, values: int, reach: int | None
) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_dropout=0.0,
        window_size=None if reach is None else (reach, 0),
    )
    attention = TorchAttention(config, 1, AttnMaskType.causal, "self")
    sizes = [(HEADS, HEAD_DIM), (groups, HEAD_DIM), (groups, values)]
    states = [torch.randn(LENGTH, 1, *size, requires_grad=True) for size in sizes]
    with Largest() as largest:
        attention(*states, None).sum().backward()
    assert 0 < largest.elements < LENGTH**2 / 2
    assert all(x.grad is not None for x in states)
