"""Settings of `policy.generation` other than the temperature of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.host_imports import part_or_none


def refuse_filters(config: PolicyConfig) -> None:
    """ConfigError for `top_p` and `top_k` if this host trains on filtered distributions.

    Hosts from 0.6 on filter log-probabilities with them in training and inference, and have a
    module for it; in earlier ones they affect generation only.
    """
    filters = part_or_none("nemo_rl.algorithms.logits_sampling_utils", "TrainingSamplingParams")
    if filters is None or config.generation is None:
        return
    found = config.generation
    for key, value, off in (("top_p", found.top_p, 1.0), ("top_k", found.top_k, None)):
        if value != off:
            raise ConfigError(
                f"policy.generation.{key} is {value}: this NeMo RL would train on the tokens that "
                f"it keeps, but this policy uses whole distributions. Set {key} to "
                f"{'null' if off is None else off} (temperature is applied)"
            )


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
