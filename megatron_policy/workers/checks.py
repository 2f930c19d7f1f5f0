"""What the driver refuses before it troubles the workers; knows neither Ray nor Megatron-Core."""

from __future__ import annotations

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError


def check_device(config: PolicyConfig, use_gpus: bool) -> None:
    """ConfigError naming the key and the fix if this config cannot run on CPU workers."""
    if not use_gpus and config.megatron_cfg.transformer_impl == "transformer_engine":
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl is 'transformer_engine', which needs GPUs, but "
            "the cluster was made with use_gpus=False; use 'auto' or 'local'."
        )
