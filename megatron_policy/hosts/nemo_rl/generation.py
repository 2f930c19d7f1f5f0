"""Text generation under the host's names, and settings of `policy.generation` as it means them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.hosts.nemo_rl.host_imports import part_or_none
from megatron_policy.hosts.nemo_rl.result_types import in_host_types
from megatron_policy.memory.states import Kind
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

_log = logging.getLogger(__name__)


class HostGeneration(MegatronPolicyWorkerImpl):
    """Generation by the policy itself, as drivers ask for it with the backend `megatron`: of every
    worker up to 0.6, later of the first one alone.
    """

    _checked = False

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Any:
        """Continue each prompt; see `GenerationOutputSpec` for the result.

        Offloaded parameters are brought back, by all workers: hosts up to 0.6 call no more than
        this. Later ones have prepared all of them, and call one.
        """
        if Kind.PARAMETERS not in self.policy.memory.state.holds:
            super().prepare_for_generation()
        return in_host_types(super().generate(data, greedy))

    def generate_async(self, data: Mapping[str, Any], greedy: bool = False) -> Iterator[Any]:
        """The number of each prompt, and its continuation as `generate` returns it, in order."""
        found = dict(self.generate(data, greedy))
        for row in range(len(found["output_ids"])):
            one = {key: value[row : row + 1] for key, value in found.items()}
            yield row, in_host_types(BatchedDataDict(one))

    def prepare_for_generation(self, **kwargs: Any) -> None:
        """Parameters on the device, for `generate`; the host's engine settings have no effect.

        NotImplementedError if the host would call only one worker of those that share the model.
        """
        if not self._checked:
            refuse_lone_generation(self.policy.topology)
            self._checked = True
        super().prepare_for_generation()

    def finish_generation(self, release_gpu: bool = True) -> None:
        """Do nothing: there is nothing to clean up."""


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


def refuse_lone_generation(topology: Topology) -> None:
    """NotImplementedError if this host sends prompts only to the first of several workers, whose
    engine distributes them, and the first worker alone does not hold the whole model: it would wait
    for the others.
    """
    module = "nemo_rl.models.generation.megatron.megatron_generation"
    if part_or_none(module, "MegatronGeneration") is None:
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


def scaled(logits: torch.Tensor, config: PolicyConfig) -> torch.Tensor:
    """Logits at temperature 1 divided by `generation.temperature`, as the host's `get_topk_logits`
    returns them in every version that has it.
    """
    temperature: Any = config.generation and config.generation.temperature
    return logits / temperature if temperature not in (None, 0, 1) else logits
