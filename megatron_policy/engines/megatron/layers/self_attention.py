"""Megatron-Core's self-attention for layers that differ in rotary embedding and biases."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Architecture
from megatron_policy.engines.megatron.layers.rope import attention_factor, columns

_E10 = 22026.465794806718  # e^10


class LayerAttention(SelfAttention):
    """Self-attention that selects its layer's angles from those of all kinds of layers."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        architecture: Architecture,
        **kwargs: Any,
    ) -> None:
        layer = layer_number - 1  # Megatron-Core counts from 1
        own = _own_config(config, architecture, layer)
        super().__init__(config=own, layer_number=layer_number, **kwargs)
        self.angles = columns(architecture, layer)

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


def _own_config(
    config: TransformerConfig, architecture: Architecture, layer: int
) -> TransformerConfig:
    """The model's config as this layer's attention needs it: its biases and norms, and the factor
    on its rotary embedding.
    """
    own = copy.copy(config)
    assert architecture.qkv_bias or not architecture.proj_bias
    own.add_bias_linear = architecture.proj_bias
    own.qk_layernorm = bool(architecture.qk_norm)
    rope = architecture.rope_of(layer)
    factor = 1.0 if rope is None else attention_factor(rope)
    if factor != 1.0:
        # Megatron-Core derives the factor from YaRN constants:
        # (0.1 * mscale * log(e^10) + 1) / (0.1 * mscale_all_dim * log(e^10) + 1).
        own.yarn_rotary_scaling_factor = _E10
        own.yarn_mscale, own.yarn_mscale_all_dim = factor - 1.0, 0.0
    return own
