"""Adapts a worker's checkpoint settings to this host."""

from __future__ import annotations

import logging
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.hosts.nemo_rl.host_imports import part_or_none

_log = logging.getLogger(__name__)


def as_host_means(
    config: PolicyConfig, weights_path: str | None, optimizer_path: str | None
) -> PolicyConfig:
    """The configuration for a start from these paths.

    A start from weights alone means a new optimizer: the host saves none with
    `checkpointing.save_optimizer=false`. Saves block if the host renames the directory, and removes
    older ones, as soon as they return.
    """
    if weights_path is not None and optimizer_path is None:
        config = _changed(config, fresh_optimizer=True)
    if config.megatron_cfg.checkpoint.async_save and not waits_for_saves():
        _log.warning(
            "megatron_cfg.checkpoint.async_save has no effect: this NeMo RL renames a checkpoint's "
            "directory without waiting for finalize_async_save, so saves block"
        )
        config = _changed(config, async_save=False)
    return config


def waits_for_saves() -> bool:
    """Whether the host of this process, if any, calls `finalize_async_save` before it renames a
    checkpoint: hosts whose workers have that method do.
    """
    if part_or_none("nemo_rl", "__name__") is None:
        return True
    module = "nemo_rl.models.policy.workers.base_policy_worker"
    return hasattr(part_or_none(module, "AbstractPolicyWorker"), "finalize_async_save")


def _changed(config: PolicyConfig, **settings: Any) -> PolicyConfig:
    checkpoint = config.megatron_cfg.checkpoint.model_copy(update=settings)
    megatron = config.megatron_cfg.model_copy(update={"checkpoint": checkpoint})
    return config.model_copy(update={"megatron_cfg": megatron})
