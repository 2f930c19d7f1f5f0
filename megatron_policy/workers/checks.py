"""Checks that refuse calls and configurations early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError


def refuse_unknown(what: str, options: Mapping[str, Any]) -> None:
    """ConfigError naming the `options` that are set, none of which `what` accepts."""
    unknown = sorted(name for name, value in options.items() if value is not None)
    if unknown:
        raise ConfigError(f"{what} has no argument {', '.join(unknown)}; leave it out")


def check_device(config: PolicyConfig, use_gpus: bool) -> None:
    """ConfigError naming the key and the fix if this config cannot run on CPU workers."""
    if not use_gpus and config.megatron_cfg.transformer_impl == "transformer_engine":
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl is 'transformer_engine', which needs GPUs, but "
            "the cluster was made with use_gpus=False; use 'auto' or 'local'"
        )


def refuse_scales(kv_scales: Any) -> None:
    """ConfigError if there are scales of a key-value cache, which no weights are sent with."""
    if kv_scales is not None:
        raise ConfigError("kv_scales: an fp8 key-value cache is not supported; leave it None")
