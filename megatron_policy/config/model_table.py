"""Binds the table of the model that a configuration names, with the fields that it overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_policy.config.layout import mtp_layers
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.config.unlisted import unlisted_table
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.formats.hf_config import (
    has_family,
    read_config,
    transformers_config,
)
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConfigError, ConversionError

_KEY = "policy.hf_config_overrides"
_SHOWN = 3


def model_table(config: PolicyConfig) -> Table:
    """The table of `config.model_name`, bound to its config.json with `hf_config_overrides`.

    ConfigError, beside those of `read_config` and `bind`, for an override that the model's config
    does not have or cannot have, or that changes which weights there are or their shapes; and for a
    checkpoint with a scalar head where the configuration has none. FSDP2 also takes models without
    a family, see `unlisted_table`.
    """
    if engine_of(config) is Engine.FSDP2:
        found = transformers_config(config.model_name, config.hf_config_overrides)
        if not has_family(found.model_type):
            return unlisted_table(found, dict(config.hf_config_overrides or {}))
    layers, head = mtp_layers(config.megatron_cfg), scalar_head(config)
    written = read_config(config.model_name)
    table = bind(written, mtp_layers=layers, head=head)
    _refuse_unwanted_head(table, head)
    overrides = dict(config.hf_config_overrides or {})
    if overrides.keys() == {_COEFFICIENT} and _COEFFICIENT not in written:
        return table  # only megatron_cfg.moe_aux_loss_coeff takes it
    if not overrides:
        return table
    try:
        changed = read_config(config.model_name, overrides)
        other = bind(changed, mtp_layers=layers, head=head)
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"{_KEY} ({', '.join(overrides)}): {error}") from error
    _refuse_other_weights(table, other, overrides)
    return replace(other, overrides={**other.overrides, **overrides})


def scalar_head(config: PolicyConfig) -> ScalarHead | None:
    """The scalar head that the configuration asks for, or None."""
    wanted = config.reward_model_cfg
    if not wanted.enabled:
        return None
    return ScalarHead(per_token=wanted.reward_model_type == "regression")


def _refuse_unwanted_head(table: Table, wanted: ScalarHead | None) -> None:
    if (found := table.architecture.head) is not None and wanted is None:
        kind = "regression" if found.per_token else "bradley_terry"
        raise ConfigError(
            "policy.model_name is a checkpoint with a scalar head, which has no vocabulary: set "
            f"policy.reward_model_cfg to enabled: true and reward_model_type: {kind}"
        )


_COEFFICIENT = "router_aux_loss_coef"


def _refuse_other_weights(table: Table, other: Table, overrides: Mapping[str, Any]) -> None:
    own, changed = table.hf_shapes(), other.hf_shapes()
    names = [name for name in {**own, **changed} if own.get(name) != changed.get(name)]
    if names:
        shown = ", ".join(
            f"{name} ({_shown(own.get(name))} to {_shown(changed.get(name))})"
            for name in names[:_SHOWN]
        )
        raise ConfigError(
            f"{_KEY} ({', '.join(overrides)}) would change weights, which stay as they are in the "
            f"files: {shown}{' and others' * (len(names) > _SHOWN)}. Leave out what does"
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
