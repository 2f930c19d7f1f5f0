"""Self-attention for layers that differ in rotary embedding and biases, and core attention on
torch's kernels for Megatron-Core's local layer spec.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_policy.attention.causal import Scores, attend
from megatron_policy.converters.architecture import Attention, Rope
from megatron_policy.converters.architecture.traits import QueryGrowth
from megatron_policy.engines.megatron.layers.norm import make_shard
from megatron_policy.engines.megatron.layers.rope import attention_factor, columns
from megatron_policy.engines.megatron.layers.sequences import SequenceParams


class TorchAttention(MegatronModule):
    """Causal scaled dot-product attention, full or sliding-window, with grouped queries, for padded
    or packed sequences, under context parallelism, with or without a KV cache.

    Replaces `DotProductAttention` in the local spec. Right padding needs no mask: no valid position
    can see a later one. Scores are materialised only if they are softcapped or there are sinks
    (learnt scores of each head that attend to nothing): the fused kernels support neither. Where
    torch and the device have a kernel that takes all sequences at once, it is called once.
    `post_rope_norm` normalizes each query and key head as it arrives, which is after the rotary
    embedding.
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
        post_rope_norm: ModuleSpec | None = None,
        query_growth: QueryGrowth | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softcap = softcap
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = make_shard(config, heads) if sinks else None
        self.query_growth = query_growth
        # Megatron-Core sums the gradients of norms of these names over tensor-parallel ranks.
        self.q_layernorm, self.k_layernorm = (
            post_rope_norm
            and post_rope_norm(config, config.kv_channels, eps=config.layernorm_epsilon)
            for _ in ("q", "k")
        )
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
        packed_seq_params: SequenceParams | None = None,
    ) -> torch.Tensor:
        """Returns the context `[S, B, N*H]`. Without `packed_seq_params` each row is one sequence
        whose keys are all on this rank; `S < K` means the last S positions of a cache of K.
        """
        assert attention_mask is None and attention_bias is None
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query_SBNH, key_KBGH = self.q_layernorm(query_SBNH), self.k_layernorm(key_KBGH)
        if (growth := self.query_growth) is not None:
            if packed_seq_params is None:
                keys = key_KBGH.size(0)
                places_S = torch.arange(keys - query_SBNH.size(0), keys, device=query_SBNH.device)
                positions_SB = places_S.unsqueeze(1)
            else:
                positions_SB = packed_seq_params.positions_TR
            factor_SB = 1 + growth.rate * torch.log(1 + torch.floor(positions_SB / growth.length))
            query_SBNH = query_SBNH * factor_SB[:, :, None, None].to(query_SBNH.dtype)
        dropout = self.dropout if self.training else 0.0
        scores = Scores(
            self.softmax_scale,
            self.reach,
            self.softcap,
            self.softmax_offset,
            dropout,
            self._dropout_state if dropout else contextlib.nullcontext,
        )
        return attend(query_SBNH, key_KBGH, value_KBGH, scores, packed_seq_params)

    def _dropout_state(self) -> contextlib.AbstractContextManager[Any]:
        # Heads differ between tensor-parallel ranks, so their dropout must too. Under sequence
        # parallelism the whole block already runs in that RNG state.
        if self.config.sequence_parallel:
            return contextlib.nullcontext()
        forked: contextlib.AbstractContextManager[Any]
        forked = tensor_parallel.get_cuda_rng_tracker().fork()
        return forked


_E10 = 22026.465794806718  # e^10


class LayerAttention(SelfAttention):
    """Self-attention that selects its layer's angles from those of all `ropes` of the model."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        part: Attention,
        ropes: Sequence[Rope],
        **kwargs: Any,
    ) -> None:
        own = copy.copy(config)
        assert part.qkv_bias or not part.proj_bias
        own.add_bias_linear = part.proj_bias
        own.qk_layernorm = bool(part.qk_norm)
        own.attention_output_gate = part.attention_output_gate
        # A window of W tokens reaches W - 1 positions back.
        own.window_size = None if part.window is None else (part.window - 1, 0)
        factor = 1.0 if part.rope is None else attention_factor(part.rope)
        if factor != 1.0:
            # Megatron-Core derives the factor from YaRN constants:
            # (0.1 * mscale * log(e^10) + 1) / (0.1 * mscale_all_dim * log(e^10) + 1).
            own.yarn_rotary_scaling_factor = _E10
            own.yarn_mscale, own.yarn_mscale_all_dim = factor - 1.0, 0.0
        super().__init__(config=own, layer_number=layer_number, **kwargs)
        self.angles = columns(part, ropes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `SelfAttention.forward`; `rotary_pos_emb` is what `Rotary` returns."""
        mine = None
        if self.angles is not None and rotary_pos_emb is not None:
            mine = rotary_pos_emb[..., self.angles]
        result: tuple[torch.Tensor, torch.Tensor | None]
        result = super().forward(hidden_states, *args, rotary_pos_emb=mine, **kwargs)
        return result

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """As in Megatron-Core, whose releases before 0.19 give a rank the output gates of all ranks
        that share its key-value group.
        """
        found: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(*args, **kwargs)
        if len(found) == 4 and found[3].size(2) != (heads := found[0].size(2)):
            first = self.pg_collection.tp.rank() * heads % found[3].size(2)
            found = (*found[:3], found[3][:, :, first : first + heads])
        return found
