"""A decoder layer that adds features of pictures to its output.

Source: Meng et al. 2024, "DeepStack"; used by Qwen3-VL.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_policy.engines.megatron.layers.sequences import PromptCache, sequences_of


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
