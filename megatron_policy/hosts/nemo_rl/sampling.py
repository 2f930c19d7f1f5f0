"""Settings of `policy.generation` as the host means them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.hosts.nemo_rl.host_imports import part_or_none


def filters_as_host_means(config: PolicyConfig) -> PolicyConfig:
    """The configuration with `generation.filter_logprobs` as this host has it.

    Hosts from 0.6 on have a module that filters log-probabilities with `top_p` and `top_k`, in
    training and inference; in earlier ones these keys affect generation only.
    """
    filters = part_or_none("nemo_rl.algorithms.logits_sampling_utils", "TrainingSamplingParams")
    if filters is not None or config.generation is None:
        return config
    generation = config.generation.model_copy(update={"filter_logprobs": False})
    return config.model_copy(update={"generation": generation})


def shares_devices(config: Mapping[str, Any]) -> bool:
    """Whether the engines of the host's `policy` section compute on the training ranks' devices;
    False if there are none.
    """
    generation = config.get("generation")
    placed = generation and generation.get("colocated")
    return bool(generation) and (placed is None or bool(placed["enabled"]))


def refuse_lone_generation(world_size: int) -> None:
    """NotImplementedError if this host sends prompts only to the first of several workers, whose
    engine distributes them: here all workers generate, and one alone would wait for the others.
    """
    module = "nemo_rl.models.generation.megatron.megatron_generation"
    if world_size > 1 and part_or_none(module, "MegatronGeneration") is not None:
        raise NotImplementedError(
            "policy.generation.backend 'megatron' is not supported for this NeMo RL with more than "
            "one worker: it gives all prompts to the first one. Use vLLM"
        )


def scaled(logits: torch.Tensor, config: PolicyConfig) -> torch.Tensor:
    """Logits at temperature 1 divided by `generation.temperature`, as the host's `get_topk_logits`
    returns them in every version that has it.
    """
    temperature: Any = config.generation and config.generation.temperature
    return logits / temperature if temperature not in (None, 0, 1) else logits
