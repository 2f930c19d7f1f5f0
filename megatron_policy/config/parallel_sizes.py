"""The parallel sizes of the engine that a configuration chooses, and the keys that set them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.config.sections import PolicySection

MEGATRON, FSDP2 = "megatron", "fsdp2"
"""Training engines: Megatron-Core, and torch's `fully_shard` over transformers' own modules."""


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks on each axis; what the engine does not split has 1."""

    section: str
    """Where the keys are, below `policy`."""
    tp: int
    tp_key: str
    cp: int
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    replicas: int = 1
    """Groups of ranks that have the whole model between them, beside one another (HSDP)."""
    first_layers: int | None = None
    """Layers of the first pipeline stage, if it has others than those between."""
    last_layers: int | None = None


def engine_of(config: PolicySection) -> str:
    """The engine that `config` enables."""
    return FSDP2 if config.dtensor_cfg.enabled else MEGATRON


def parallel_sizes(config: PolicySection) -> ParallelSizes:
    """The sizes of the engine that `config` enables."""
    if engine_of(config) == FSDP2:
        own = config.dtensor_cfg
        return ParallelSizes(
            "policy.dtensor_cfg",
            own.tensor_parallel_size,
            "tensor_parallel_size",
            own.context_parallel_size,
            sequence_parallel=own.sequence_parallel,
            replicas=own.dp_replicate_size,
        )
    megatron = config.megatron_cfg
    return ParallelSizes(
        "policy.megatron_cfg",
        megatron.tensor_model_parallel_size,
        "tensor_model_parallel_size",
        megatron.context_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.virtual_pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
        megatron.sequence_parallel,
        first_layers=megatron.num_layers_in_first_pipeline_stage,
        last_layers=megatron.num_layers_in_last_pipeline_stage,
    )
