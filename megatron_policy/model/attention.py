"""Core attention on torch's kernels for Megatron-Core's local layer spec; knows nothing of models.

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

from megatron_policy.device import current_device
from megatron_policy.model.scales import softcap


class TorchAttention(MegatronModule):
    """Causal scaled dot-product attention, full or in a sliding window, grouped queries, with or
    without a KV cache.

    Takes the place of `DotProductAttention` in the local spec. Right padding needs no mask: no
    valid position can see a later one. Scores are only made explicit when they are capped or
    there are sinks, learnt scores of each head that attend to nothing: the fused kernels know
    neither.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, (
            "context parallelism is refused by the layout check"
        )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softcap = softcap
        self.softmax_offset = _sinks(config) if sinks else None
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
        # A single query behind a cache sees every key; several are the whole sequence, bottom-right
        # aligned or not.
        assert queries == keys or queries == 1, "a cache is extended by one position at a time"
        mask_SK = self._mask(queries, keys, query_SBNH.device)
        states = [x.permute(1, 2, 0, 3) for x in (query_SBNH, key_KBGH, value_KBGH)]
        dropout = self.dropout if self.training else 0.0
        fused = self.softcap is None and self.softmax_offset is None
        attend = self._fused if fused else self._explicit
        with self._dropout_state(dropout):
            context_BNSH = attend(*states, mask_SK, dropout)
        return context_BNSH.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """Which keys a query sees, `[S, K]`; None: all up to its own."""
        if self.reach is None or keys <= self.reach + 1:
            return None
        key, query = _positions(queries, keys, device)
        return (key <= query) & (key >= query - self.reach)

    def _fused(
        self,
        query_BNSH: torch.Tensor,
        key_BGKH: torch.Tensor,
        value_BGKH: torch.Tensor,
        mask_SK: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query_BNSH,
            key_BGKH,
            value_BGKH,
            attn_mask=mask_SK,
            dropout_p=dropout,
            is_causal=mask_SK is None and query_BNSH.size(2) > 1,
            scale=self.softmax_scale,
            enable_gqa=query_BNSH.size(1) != key_BGKH.size(1),
        )

    def _explicit(
        self,
        query_BNSH: torch.Tensor,
        key_BGKH: torch.Tensor,
        value_BGKH: torch.Tensor,
        mask_SK: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        shared = query_BNSH.size(1) // key_BGKH.size(1)
        key_BNKH, value_BNKH = (x.repeat_interleave(shared, 1) for x in (key_BGKH, value_BGKH))
        scores_BNSK = query_BNSH @ key_BNKH.mT * self.softmax_scale
        if self.softcap is not None:
            scores_BNSK = softcap(scores_BNSK, self.softcap)
        if mask_SK is None:
            key, query = _positions(*scores_BNSK.shape[-2:], scores_BNSK.device)
            mask_SK = key <= query
        scores_BNSK = scores_BNSK.masked_fill(~mask_SK, float("-inf"))
        if self.softmax_offset is not None:
            sinks_BNS1 = self.softmax_offset[:, None, None].expand(*scores_BNSK.shape[:-1], 1)
            scores_BNSK = torch.cat([scores_BNSK, sinks_BNS1], -1)
        weights_BNSK = scores_BNSK.softmax(-1, dtype=torch.float32).to(query_BNSH.dtype)
        weights_BNSK = weights_BNSK[..., : key_BGKH.size(2)]
        return F.dropout(weights_BNSK, dropout) @ value_BNKH

    def _dropout_state(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        # Heads differ between tensor-parallel ranks, so must their dropout. Under sequence
        # parallelism the whole block runs in that state already.
        if dropout > 0 and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _sinks(config: TransformerConfig) -> torch.nn.Parameter:
    """One score per head of this rank, marked as shared out over the tensor-parallel ranks."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = torch.nn.Parameter(
        torch.empty(heads, device=current_device(), dtype=config.params_dtype)
    )
    tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def _positions(queries: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys as a row, and of queries, which are the last of them, as a column."""
    positions = torch.arange(keys, device=device)
    return positions, positions[keys - queries :].unsqueeze(1)
