"""Core attention on torch's fused kernels for Megatron-Core's local layer spec; knows nothing of
models.

Shapes: S query positions, K key positions, B batch, N query heads, G key-value groups, H head dim.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


class TorchAttention(MegatronModule):
    """Causal scaled dot-product attention, full or in a sliding window, grouped queries, with or
    without a KV cache.

    Takes the place of `DotProductAttention` in the local spec. Right padding needs no mask: no
    valid position can see a later one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, (
            "context parallelism is refused by the layout check"
        )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.reach = config.window_size[0] if windowed else None

    def forward(
        self,
        query_SBNH: torch.Tensor,
        key_KBGH: torch.Tensor,
        value_KBGH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns the context `[S, B, N*H]`; `S < K` means the last S positions of a cache of K."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        queries, keys = query_SBNH.size(0), key_KBGH.size(0)
        bounded = self.reach is not None and keys > self.reach + 1
        mask_SK = self._window(queries, keys, query_SBNH.device) if bounded else None
        # A single query behind a cache sees every key; several are the whole sequence, bottom-right
        # aligned or not.
        assert queries == keys or queries == 1, "a cache is extended by one position at a time"
        context_BNSH = self._attend(
            *(x.permute(1, 2, 0, 3) for x in (query_SBNH, key_KBGH, value_KBGH)),
            mask=mask_SK,
            causal=mask_SK is None and queries > 1,
        )
        return context_BNSH.permute(2, 0, 1, 3).flatten(2)

    def _window(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        assert self.reach is not None
        key = torch.arange(keys, device=device)
        query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
        return (key <= query) & (key >= query - self.reach)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        with self._dropout_state(dropout):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )

    def _dropout_state(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        # Heads differ between tensor-parallel ranks, so must their dropout. Under sequence
        # parallelism the whole block runs in that state already.
        if dropout > 0 and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()
