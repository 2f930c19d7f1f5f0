"""What a policy is, in a few words: its model's family and size, its layout and its precision."""

from __future__ import annotations

import math

from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.converters.table import Table
from megatron_policy.parallel.topology import Topology

_UNITS = ("", "K", "M", "B", "T")


def described(config: PolicyConfig, table: Table, topology: Topology) -> str:
    """Describe a policy, as in "qwen2 494M, tp 2 x cp 1 x pp 1 x dp 4, bfloat16"."""
    axes = " x ".join(f"{axis} {getattr(topology, axis)}" for axis in ("tp", "cp", "pp", "dp"))
    if table.architecture.moe is not None:
        axes += f", experts ep {topology.ep} x etp {topology.expert_tp}"
    engine = engine_of(config)
    if engine is not Engine.MEGATRON_CORE:
        axes += f" under {engine.name}"
    adapters = ", adapters" if config.megatron_cfg.peft.enabled else ""
    return f"{table.family} {count(parameters(table))}, {axes}, {config.precision}{adapters}"


def parameters(table: Table) -> int:
    """The parameters of the model, without padding; tied ones once."""
    return sum(
        math.prod(unpadded_shape(entry.row, table.architecture))
        for entry in table.entries
        if entry.row.owns and entry.row.learnt
    )


def count(number: float) -> str:
    """A number with three digits, as in 494M."""
    power = 0
    while number >= 999.5 and power < len(_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{_UNITS[power]}"
