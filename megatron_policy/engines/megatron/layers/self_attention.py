"""Megatron-Core's self-attention for layers that differ in rotary embedding and biases."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Attention, Rope
from megatron_policy.engines.megatron.layers.rope import attention_factor, columns

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
