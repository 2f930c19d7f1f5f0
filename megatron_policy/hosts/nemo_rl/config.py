"""The host's configuration as this package means it, and what of it this package cannot do."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.config.parallel_sizes import parallel_sizes
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.host_imports import find_part
from megatron_policy.parallel.topology import Topology

_log = logging.getLogger(__name__)

AXES = {
    "pipeline_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "tensor_parallel": "tp",
}
"""The host's axes, slowest first, in the order of our rank numbering."""


def parse_host_config(
    config: PolicyConfig | Mapping[str, Any], weights_path: str | None, optimizer_path: str | None
) -> PolicyConfig:
    """The configuration for a start from these paths, with what the host means by it.

    A start from weights alone means a new optimizer: the host saves none with
    `checkpointing.save_optimizer=false`. Saves block if the host renames the directory, and removes
    older ones, as soon as they return. Filters (`generation.top_p`, `top_k`) apply to
    log-probabilities, in training and inference, where the host has a module for that, from 0.6 on;
    in earlier ones they affect generation only.
    """
    parsed, saving = PolicyConfig.parse(config), dict[str, Any]()
    if weights_path is not None and optimizer_path is None:
        saving["fresh_optimizer"] = True
    if parsed.megatron_cfg.checkpoint.async_save and not waits_for_saves():
        _log.warning(
            "megatron_cfg.checkpoint.async_save has no effect: this NeMo RL renames a checkpoint's "
            "directory without waiting for finalize_async_save, so saves block"
        )
        saving["async_save"] = False
    if saving:
        checkpoint = parsed.megatron_cfg.checkpoint.model_copy(update=saving)
        megatron = parsed.megatron_cfg.model_copy(update={"checkpoint": checkpoint})
        parsed = parsed.model_copy(update={"megatron_cfg": megatron})
    filters = find_part("nemo_rl.algorithms.logits_sampling_utils", "TrainingSamplingParams")
    if filters is None and parsed.generation is not None:
        generation = parsed.generation.model_copy(update={"filter_logprobs": False})
        parsed = parsed.model_copy(update={"generation": generation})
    return parsed


def waits_for_saves() -> bool:
    """Whether the host of this process, if any, calls `finalize_async_save` before it renames a
    checkpoint: hosts whose workers have that method do.
    """
    if find_part("nemo_rl", "__name__") is None:
        return True
    module = "nemo_rl.models.policy.workers.base_policy_worker"
    return hasattr(find_part(module, "AbstractPolicyWorker"), "finalize_async_save")


def check_layout_of_host(annotations: Any, config: PolicyConfig) -> None:
    """ConfigError, naming both, unless the host's `NamedSharding` is the rank grid of this
    configuration. None, or an object without `names` and `layout`, is not compared.
    """
    if not (hasattr(annotations, "names") and hasattr(annotations, "layout")):
        return
    names, ranks = list(annotations.names), annotations.layout
    found = dict(zip(names, ranks.shape, strict=True))
    topology = topology_of(config, ranks.size)
    ours = {name: getattr(topology, axis) for name, axis in AXES.items()}
    # A missing axis has size 1.
    alike = [name for name in AXES if name in found] == names
    alike = alike and all(found.get(name, 1) == size for name, size in ours.items())
    if not alike or ranks.flatten().tolist() != list(range(math.prod(ours.values()))):
        raise ConfigError(
            f"the driver laid out its ranks as {found} with ranks {ranks.flatten().tolist()}, but "
            f"the configuration asks for {ours} with ranks in that order, the last axis fastest: "
            "make the cluster's size and the parallel sizes in "
            f"{parallel_sizes(config).section} agree"
        )


def shares_devices(config: Mapping[str, Any]) -> bool:
    """Whether the engines of the host's `policy` section compute on the training ranks' devices;
    False if there are none.
    """
    generation = config.get("generation")
    placed = generation and generation.get("colocated")
    return bool(generation) and (placed is None or bool(placed["enabled"]))


def refuse_lone_generation(topology: Topology) -> None:
    """NotImplementedError if this host sends prompts only to the first of several workers, whose
    engine distributes them, and the first worker alone does not hold the whole model: it would wait
    for the others.
    """
    module = "nemo_rl.models.generation.megatron.megatron_generation"
    if find_part(module, "MegatronGeneration") is None:
        return
    if topology.world_size != topology.dp or topology.joins_replicas:
        raise NotImplementedError(
            "policy.generation.backend 'megatron': this NeMo RL gives all prompts to the first "
            "worker, which holds only a part of the model. Set all parallel sizes of "
            "policy.megatron_cfg to 1, and the first worker generates alone, or use vLLM"
        )
    if topology.world_size > 1:
        _log.warning(
            "policy.generation.backend 'megatron': this NeMo RL gives all prompts to the first of "
            "%d workers, and here one call's prompts after another's: for small experiments. Use "
            "vLLM for others",
            topology.world_size,
        )
