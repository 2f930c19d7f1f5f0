"""The sections of the engine that shards transformers' own modules with FSDP2 (`dtensor_cfg`) or
FSDP1 (`fsdp_cfg`), with optimizers and schedules of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_policy.config.numbers import Count, CountOrZero
from megatron_policy.config.section import Section, ValueSection
from megatron_policy.config.trained import AutomodelFreezeConfig, ParamGroupConfig

SchedulerMilestones = dict[str, list[CountOrZero]]


def as_text(value: Any) -> Any:
    """A mapping of environment variables, whose values are text whatever YAML made of them."""
    return {k: str(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def check_schedules(value: Any) -> Any:
    """A schedule or several; ValueError for milestones that are not steps."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(each, Mapping) or "milestones" not in each:
            continue
        found = each["milestones"]
        steps = isinstance(found, list | tuple) and all(
            isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in found
        )
        if not steps:
            raise ValueError(f"milestones are a list of whole numbers from 0 on, not {found!r:.60}")
    return value


class TransformersConfig(Section):
    """What the engine over transformers' own modules reads, whatever shards them."""

    enabled: bool = False
    """Chooses transformers' own modules as the engine, under FSDP2 (`dtensor_cfg`) or FSDP1
    (`fsdp_cfg`, which is of this project); see fsdp.md.
    """
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """`auto` is this package's attention, which computes packed and split sequences too; the others
    are those of transformers, for padded rows.
    """
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config, as hosts give them to `from_pretrained`. They are
    `hf_config_overrides`, which count where both have a field.
    """
    weight_decay_of: Literal["all", "matrices"] = "all"
    """The parameters that the optimizer's weight decay applies to: all, as in torch, or those of
    linear layers, embeddings and experts, as in Megatron-Core.
    """
    clear_cache_every_n_steps: Count | None = None
    """Training steps after which unused device memory is given back; never if not given."""
    env_vars: Annotated[dict[str, str], BeforeValidator(as_text)] = Field(default_factory=dict)
    """Environment variables of the workers."""


class AutomodelConfig(Section):
    """What NeMo RL hands to NeMo Automodel."""

    freeze_config: AutomodelFreezeConfig | None = None


class DTensorConfig(TransformersConfig):
    """Transformers' own modules, sharded by torch's `fully_shard` (FSDP2)."""

    cpu_offload: bool = False
    """Without effect where parameters are in host memory anyway; refused on GPUs."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share out positions between layers."""
    activation_checkpointing: bool = False
    """The backward pass computes activations again instead of keeping them."""
    tensor_parallel_size: Count = 1
    """Ranks that share out each layer (TP)."""
    context_parallel_size: Count = 1
    """Ranks that share out the positions of each row (CP)."""
    expert_parallel_size: Count = 1
    """Refused beside `enabled`: see fsdp.md."""
    dp_replicate_size: Count = 1
    """Groups of ranks that have the whole model between them, beside one another (HSDP)."""
    custom_parallel_plan: str | None = None
    """Styles, or torch's objects, by names of modules; see fsdp.md."""
    automodel_kwargs: AutomodelConfig = AutomodelConfig()


class Fsdp1Config(TransformersConfig):
    """Transformers' own modules, sharded by torch's `FullyShardedDataParallel` (FSDP1)."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "no_shard"] = "full_shard"
    """What ranks share out: all (full_shard); all, but weights are whole from a forward pass to the
    end of its backward pass (shard_grad_op); nothing, and every rank has the whole model
    (no_shard).
    """
    fsdp_offload_enabled: bool = False
    """`policy.fsdp_offload_enabled` if not given; refused on GPUs: see fsdp.md."""
    activation_checkpointing_enabled: bool = False
    """`policy.activation_checkpointing_enabled` if not given."""


class PytorchOptimizerConfig(ValueSection):
    """An optimizer by the path at which it is imported, such as torch.optim.AdamW."""

    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Of this project: parameters that are trained otherwise, or frozen; the first group that fits
    one counts. They have no `min_lr`: the schedule multiplies all rates alike.
    """


class SinglePytorchSchedulerConfig(ValueSection):
    """A schedule by the path at which it is imported, such as torch.optim.lr_scheduler.LinearLR."""

    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
