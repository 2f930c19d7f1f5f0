"""Transformer Engine attention for padded and packed sequences under context parallelism.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim.
Source of its capabilities: Transformer Engine's documentation of `DotProductAttention`, 2.x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version

from megatron_policy.device import trains_packed_cudnn
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.engines.megatron.layers.sequences import SequenceParams

_HALF = (torch.bfloat16, torch.float16)


def te_attention(te_module: Callable[..., torch.nn.Module]) -> ModuleSpec:
    """The spec for core attention; `te_module` is Megatron-Core's `TEDotProductAttention`."""
    return ModuleSpec(module=TEAttention, params={"te_module": te_module})


class TEAttention(MegatronModule):
    """Transformer Engine attention, with torch's for calls that it does not support."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        te_module: Callable[..., torch.nn.Module],
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        common = (config, layer_number, attn_mask_type, attention_type)
        self.te_module = te_module(*common, **kwargs)
        self.fallback = TorchAttention(*common, **kwargs)

    def forward(
        self,
        query_SBNH: torch.Tensor,
        key_KBGH: torch.Tensor,
        value_KBGH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: SequenceParams | None = None,
    ) -> torch.Tensor:
        """As `TorchAttention.forward`."""
        states = (query_SBNH, key_KBGH, value_KBGH)
        if self._exceeds_te(packed_seq_params, query_SBNH, value_KBGH):
            context: torch.Tensor = self.fallback(
                *states, attention_mask, packed_seq_params=packed_seq_params
            )
            return context
        packed = packed_seq_params and packed_seq_params.packed
        if packed is None:
            context = self.te_module(*states, attention_mask, attn_mask_type, attention_bias)
            return context
        flat = [x.squeeze(1) for x in states]
        context = self.te_module(
            *flat, attention_mask, attn_mask_type, attention_bias, packed_seq_params=packed
        )
        return context.reshape(query_SBNH.size(0), 1, -1)

    def _exceeds_te(
        self, params: SequenceParams | None, query_SBNH: torch.Tensor, value_KBGH: torch.Tensor
    ) -> bool:
        split: bool = self.config.context_parallel_size > 1
        if params is not None and not params.causal:
            return True
        if params is None or (params.packed is None and not split):
            # Transformer Engine would take each rank's whole sequences for shares of longer ones.
            return split
        # Only its fused kernels support packing and context parallelism. They need 16 bits; their
        # support for windows and for two head sizes depends on the release and on the GPU.
        head, value_head = query_SBNH.size(-1), value_KBGH.size(-1)
        windowed = self.fallback.reach is not None
        if query_SBNH.dtype not in _HALF:
            return True
        if head != value_head:
            return windowed or not two_head_sizes(head, value_head)
        # Its exchange between neighbours, which Megatron-Core takes by default, has no windows.
        return windowed and split

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Checkpoints hold Transformer Engine's state only: there is nothing else to save."""
        te_module: Any = self.te_module
        kept: dict[str, Any] = te_module.sharded_state_dict(*args, **kwargs)
        return kept


def two_head_sizes(head: int, value_head: int) -> bool:
    """Whether Transformer Engine's fused attention trains on packed or split sequences whose values
    have heads of another size than queries and keys.

    Its exchange between context-parallel ranks takes two sizes since 2.5. Of what it runs on cuDNN
    for training, this is the part that does not depend on the GPU: multiples of 8 up to 128, and
    192 with 128 (`nvte_get_fused_attn_backend`).
    """
    sizes = head % 8 == value_head % 8 == 0 and max(head, value_head) <= 128
    known: bool = sizes or (head, value_head) == (192, 128)
    return known and trains_packed_cudnn() and bool(is_te_min_version("2.5.0"))
