"""The Hugging Face side: one forward pass in one process, attention computed eagerly.

Shapes: B rows, S positions, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_policy.device import current_device
from megatron_policy.errors import ConfigError
from megatron_policy.parity.result import Job, Reading


@torch.no_grad()
def read_reference(model: str, job: Job, dtype: str, per_layer: bool) -> Reading:
    """Load the checkpoint in transformers as `dtype` and read it on the job's tokens.

    The model is gone afterwards. ConfigError when transformers cannot load it, or compute with it.
    """
    tokens_BS, hf = job.draw(), _load(model, dtype)
    layers: dict[int, torch.Tensor] = {}
    if per_layer:
        for number, layer in enumerate(_decoder_layers(hf, job.num_layers)):
            layer.register_forward_hook(_keep(layers, number))
    try:
        logits_BSV = hf(tokens_BS.to(current_device()), use_cache=False).logits.float().cpu()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"transformers cannot compute with {model}: {error}") from error
    logprobs_BSV = logits_BSV[:, :-1].log_softmax(-1)
    logprobs_BS = logprobs_BSV.gather(-1, tokens_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return Reading(logits_BSV, logprobs_BS, layers)


def _load(model: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, PretrainedConfig

    plainly = {"attn_implementation": "eager"}
    if hasattr(PretrainedConfig, "_experts_implementation"):
        # The fast one of newer releases is for some widths only.
        plainly["experts_implementation"] = "eager"
    try:
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **plainly)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"transformers cannot load {model}: {error}") from error
    return hf.to(current_device()).eval()


def _decoder_layers(hf: Any, num_layers: int) -> torch.nn.ModuleList:
    layers = getattr(hf.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) < num_layers:
        raise ConfigError(
            f"{type(hf).__name__} does not keep its {num_layers} decoder layers in a list "
            "`layers`; compare without --per-layer"
        )
    return layers[:num_layers]


def _keep(layers: dict[int, torch.Tensor], number: int) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        layers[number] = hidden_BSD.float().cpu()

    return hook
