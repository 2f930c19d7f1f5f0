"""Megatron-Core's multi-latent attention (MLA) with Hugging Face's rotary embedding and norms.

Shapes: T positions, R rows, 1 if they are alike.
Source: DeepSeek-AI 2024, "DeepSeek-V2".
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_policy.converters.architecture import Mla
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.engines.megatron.layers.norm import RMSNorm, WholeLinear
from megatron_policy.engines.megatron.layers.rope import (
    assert_whole,
    attention_factor,
    inverse_frequencies,
)
from megatron_policy.engines.megatron.layers.sequences import SequenceParams
from megatron_policy.engines.megatron.layers.te_attention import te_attention


def mla_fields(mla: Mla | None) -> dict[str, Any]:
    """Fields of Megatron-Core's config for MLA; empty if the model has none."""
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Of the two kinds, the one that can also scale the angles' cosine and sine.
        "rope_type": "yarn",
    }


def mla_spec(mla: Mla, with_te: bool) -> ModuleSpec:
    """The spec Megatron-Core builds a layer's MLA from."""
    column, row, core = ColumnParallelLinear, RowParallelLinear, TorchAttention
    if with_te:
        from megatron.core.extensions import transformer_engine as te

        column, row = te.TEColumnParallelLinear, te.TERowParallelLinear
        core = te_attention(te.TEDotProductAttention)
    norm = ModuleSpec(module=MlaNorm, params={"own_eps": mla.layernorm_epsilon})
    return ModuleSpec(
        module=MlaAttention,
        params={"attn_mask_type": AttnMaskType.causal, "part": mla},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=core,
            linear_proj=row,
            q_layernorm=IdentityOp if mla.q_lora_rank is None else norm,
            kv_layernorm=norm,
        ),
    )


class MlaNorm(RMSNorm):
    """The norm of a compressed vector; its epsilon differs from that of the model's other norms."""

    def __init__(self, own_eps: float, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"eps": own_eps})


class MlaAttention(MLASelfAttention):
    """MLA with the part's angles, softmax scale and norms."""

    def __init__(self, config: MLATransformerConfig, part: Mla, **kwargs: Any) -> None:
        scale = part.attention_scale
        own = copy.copy(config)
        # Megatron-Core derives the softmax scale from YaRN constants:
        # (0.1 * mscale_all_dim * log(e) + 1)^2 / sqrt(head size).
        relative = 1.0 if scale is None else scale * math.sqrt(part.kv_channels)
        own.rotary_scaling_factor, own.mscale_all_dim = math.e, 10 * (math.sqrt(relative) - 1)
        super().__init__(config=own, **kwargs)
        self.rotary_pos_emb = MlaRotary(part.rope, part.qk_rope_head_dim)
        # With Megatron-Core's own projection, which is split, the gradient of the rotated keys that
        # all heads share would lack the contributions of other ranks' heads.
        if part.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(own, own.hidden_size, part.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(own, own.hidden_size, part.down_size)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: SequenceParams | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As in Megatron-Core, which would drop the row dimension if it were given sequences. Here
        only the rotary embedding is given them, since it needs their positions.
        """
        self.rotary_pos_emb.positions_TR = packed_seq_params and packed_seq_params.positions_TR
        result: tuple[torch.Tensor | None, ...]
        result = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, None, *args, **kwargs
        )
        return result

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Newer releases derive norms from flags, which cannot express a norm on keys alone."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}


class MlaRotary(torch.nn.Module):
    """Angles `[T, R, 1, head size]` in fp32 of the rotated part of a head, and their factor."""

    def __init__(self, rope: Rope | None, head_dim: int) -> None:
        """Without `rope` all angles are 0."""
        super().__init__()
        found = torch.zeros(head_dim // 2) if rope is None else inverse_frequencies(rope, head_dim)
        self.frequencies = found.to(current_device())
        self.factor = 1.0 if rope is None else attention_factor(rope)
        self.positions_TR: torch.Tensor | None = None
        """Positions of the next tokens, if they do not count from 0; R is 1 if rows are alike."""

    def forward(self, length: int, **_: Any) -> tuple[torch.Tensor, float]:
        """The angles of the next `length` positions."""
        positions_TR = self.positions_TR
        if positions_TR is None:
            positions_TR = torch.arange(length, device=self.frequencies.device).unsqueeze(1)
        angles = positions_TR.unsqueeze(-1).float() * self.frequencies
        return torch.cat((angles, angles), -1).unsqueeze(2), self.factor

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> int:
        """How many positions the attention is about to need."""
        assert packed_seq_params is None
        if self.positions_TR is not None:
            return len(self.positions_TR)
        assert_whole(inference_context, transformer_config)
        if inference_context is not None:
            return int(inference_context.max_sequence_length)
        parts = transformer_config.tensor_model_parallel_size
        given = transformer_input.size(0)
        return given * parts if transformer_config.sequence_parallel else given
