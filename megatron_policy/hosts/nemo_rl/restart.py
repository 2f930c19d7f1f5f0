"""How a worker starts from a checkpoint that the host names; reads none."""

from __future__ import annotations

from megatron_policy.config import PolicyConfig


def with_fresh_optimizer(config: PolicyConfig) -> PolicyConfig:
    """The configuration of a start from weights alone: without an optimizer's path the host means
    an optimizer that begins anew (it saves none with `checkpointing.save_optimizer=false`).
    """
    checkpoint = config.megatron_cfg.checkpoint.model_copy(update={"fresh_optimizer": True})
    megatron = config.megatron_cfg.model_copy(update={"checkpoint": checkpoint})
    return config.model_copy(update={"megatron_cfg": megatron})
