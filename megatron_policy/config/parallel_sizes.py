"""The parallel sizes of the engine that a configuration chooses, and the keys that set them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from megatron_policy.config.fsdp import TransformersConfig
from megatron_policy.config.sections import PolicySection
from megatron_policy.errors import ConfigError


class Engine(Enum):
    """The training engines."""

    MEGATRON_CORE = auto()
    FSDP2 = auto()
    """Transformers' own modules, sharded by torch's `fully_shard`."""
    FSDP1 = auto()
    """Transformers' own modules, sharded by torch's `FullyShardedDataParallel`."""


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
    layout: str | None = None
    """What each model chunk has, as `read_layout` takes it."""


MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
    "layout": "pipeline_model_parallel_layout",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""The key of `megatron_cfg` for each of the sizes that it can set."""


def keys_of_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `megatron_cfg` for what `sizes` has of `MEGATRON_SIZES`; None is not given."""
    return {key: sizes[name] for name, key in MEGATRON_SIZES.items() if sizes.get(name) is not None}


def engine_of(config: PolicySection) -> Engine:
    """The engine that `config` enables."""
    if config.fsdp_cfg.enabled:
        return Engine.FSDP1
    return Engine.FSDP2 if config.dtensor_cfg.enabled else Engine.MEGATRON_CORE


def transformers_settings(config: PolicySection) -> TransformersConfig:
    """The section of the engine over transformers' own modules, which `config` enables."""
    return config.fsdp_cfg if engine_of(config) is Engine.FSDP1 else config.dtensor_cfg


def model_copies(config: PolicySection, world_size: int) -> int:
    """How many times so many ranks have the whole model, in shards or each in full."""
    if engine_of(config) is Engine.FSDP1 and config.fsdp_cfg.sharding_strategy == "no_shard":
        return world_size
    return parallel_sizes(config).replicas


def env_vars_of(config: PolicySection) -> dict[str, str]:
    """The environment variables that `config` gives to workers."""
    if engine_of(config) is Engine.MEGATRON_CORE:
        return config.megatron_cfg.env_vars
    return transformers_settings(config).env_vars


def parallel_sizes(config: PolicySection) -> ParallelSizes:
    """The sizes of the engine that `config` enables."""
    engine = engine_of(config)
    if engine is Engine.FSDP1:
        return ParallelSizes("policy.fsdp_cfg", 1, "tensor_parallel_size", 1)
    if engine is Engine.FSDP2:
        own = config.dtensor_cfg
        return ParallelSizes(
            "policy.dtensor_cfg",
            own.tensor_parallel_size,
            "tensor_parallel_size",
            own.context_parallel_size,
            sequence_parallel=own.sequence_parallel and own.tensor_parallel_size > 1,
            replicas=own.dp_replicate_size,
        )
    sizes = {name: getattr(config.megatron_cfg, key) for name, key in MEGATRON_SIZES.items()}
    if sizes["layout"] is not None:
        sizes["vpp"] = _count_chunks(sizes, config.megatron_cfg.mtp_num_layers)
    return ParallelSizes("policy.megatron_cfg", tp_key=MEGATRON_SIZES["tp"], **sizes)


def read_layout(layout: str) -> tuple[tuple[int, ...], int]:
    """The decoder layers of each model chunk, in the order of the layers, and those for multi-token
    prediction, from what Megatron-Core takes for them, such as `Et|(tt|)*3tmL`: E is the embedding,
    t a decoder layer, m one for multi-token prediction, L the head.

    ConfigError unless each chunk has a layer, E is in the first one, and m and L are in the last.
    """
    written = layout.replace(",", "").replace(" ", "")
    for repeated in (r"\(([^()]*)\)\*(\d{1,5})", r"(\w)\*(\d{1,5})"):
        written = re.sub(repeated, lambda found: found[1] * int(found[2]), written)
    if not re.fullmatch(r"Et+(\|t+)*m*L", written):
        raise ConfigError(
            f"policy.megatron_cfg.pipeline_model_parallel_layout={layout!r} is not understood: "
            "chunks are separated by |; begin with E, give each chunk one t or more, and end with "
            "L, as in 'Et|(tt|)*3tL'"
        )
    return tuple(chunk.count("t") for chunk in written.split("|")), written.count("m")


def _count_chunks(sizes: Mapping[str, Any], predicting: int) -> int:
    """Model chunks of each stage in a layout; ConfigError if another of the `sizes` forbids it, or
    the number of layers for multi-token prediction, `predicting`.
    """
    counts, found = read_layout(sizes["layout"])
    if found != predicting:
        raise ConfigError(
            f"policy.megatron_cfg.pipeline_model_parallel_layout has {found} layers for "
            f"multi-token prediction (m), but mtp_num_layers is {predicting}: make both agree"
        )
    chunks, pp = len(counts), int(sizes["pp"])
    each, left = divmod(chunks, pp)
    ends = sizes["first_layers"], sizes["last_layers"]
    if left or (pp == 1 and each > 1) or sizes["vpp"] not in (1, each) or ends != (None, None):
        raise ConfigError(
            f"policy.megatron_cfg.pipeline_model_parallel_layout has {chunks} chunks for "
            f"pipeline_model_parallel_size={pp}: give each stage as many, and leave out "
            "virtual_pipeline_model_parallel_size and num_layers_in_first_pipeline_stage and "
            "..._last_..., which follow from it"
        )
    return each


RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What tells a process which rank it is; whoever starts the ranks sets them."""


def check_env_vars(where: str, env_vars: Mapping[str, str]) -> None:
    """ConfigError if variables that workers are to get would change which ranks they are."""
    if taken := sorted(set(RANK_VARIABLES).intersection(env_vars)):
        raise ConfigError(
            f"{where} sets {', '.join(taken)}, which say which rank a worker is and are set for "
            "each: remove them"
        )
