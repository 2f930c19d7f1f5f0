"""A decoder layer that applies attention and MLP in parallel.

Source: Wang and Komatsuzaki 2021, "GPT-J-6B"; used by Cohere's Command R.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor


class ParallelLayer(TransformerLayer):
    """`x + dropout(attention(norm(x))) + dropout(mlp(norm(x)))`, one norm for both.

    Supports selective recomputation of core attention and of the MLP.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[S, B, D]` to the same, as `TransformerLayer.forward`; there is no cross attention."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(
            normed,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        if self.recompute_mlp:
            mixed = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            mixed = self.mlp(normed)
        fused = self.config.bias_dropout_fusion
        with self.bias_dropout_add_exec_handler():
            hidden_states = self.self_attn_bda(self.training, fused)(
                attended, hidden_states, self.hidden_dropout
            )
            hidden_states = self.mlp_bda(self.training, fused)(
                mixed, hidden_states, self.hidden_dropout
            )
        # Without gradients the sums are made in place, in what can be a view. Pipeline schedules
        # free the data of what a chunk returns, and refuse views.
        output: torch.Tensor = make_viewless_tensor(
            inp=hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True
        )
        return output, None
