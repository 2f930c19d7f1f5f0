"""Decoder layers that Megatron-Core does not have, and how the output of attention or an MLP is
added to the residual stream.

Sources: Wang and Komatsuzaki 2021, "GPT-J-6B", of attention and MLP in parallel (Cohere's Command
R); Meng et al. 2024, "DeepStack", of features of pictures that are added (Qwen3-VL); Liu et al.
2022, "Swin Transformer V2", of norms after attention and MLP; Yang et al. 2022, "Tensor Programs
V", of the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.engines.megatron.layers.norm import norm_of
from megatron_policy.engines.megatron.layers.sequences import PromptCache, sequences_of


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


class DeepLayer(TransformerLayer):
    """A layer of Megatron-Core, to whose output it adds what travels with the microbatch for it."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `TransformerLayer.forward`."""
        hidden_SRD, context = super().forward(*args, **kwargs)
        cache: PromptCache | None = kwargs.get("inference_context")
        holder = cache or sequences_of(kwargs.get("packed_seq_params"))
        own = () if holder is None else holder.deep[self.layer_number - 1 : self.layer_number]
        for deep_SRD in own:
            hidden_SRD = hidden_SRD + deep_SRD
        return hidden_SRD, context


class ResidualSum(torch.nn.Module):
    """`residual + dropout(scale * norm(x + bias))`, for Megatron-Core's bias-dropout-add."""

    def __init__(self, config: TransformerConfig, norm: ModuleSpec | None, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.norm = norm and norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function that a Megatron-Core layer calls next; there is no fused kernel for it."""

        def add(
            x_with_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            x, bias = x_with_bias
            if bias is not None:
                x = x + bias
            if self.norm is not None:
                x = self.norm(x)
            if self.scale != 1.0:
                x = x * self.scale
            return residual + torch.nn.functional.dropout(x, dropout, training)

        return add


def residual_sum(
    architecture: Architecture, norms: Norms, config: TransformerConfig, factor: float = 1.0
) -> ModuleSpec | None:
    """A layer's own residual sum, with a `factor` on what is added; None for Megatron-Core's plain
    sum.
    """
    scale = architecture.residual_scale * factor
    if not norms.after and scale == 1.0:
        return None
    params: dict[str, Any] = {
        "config": config,
        "norm": norm_of(architecture) if norms.after else None,
        "scale": scale,
    }
    return ModuleSpec(module=ResidualSum, params=params)
