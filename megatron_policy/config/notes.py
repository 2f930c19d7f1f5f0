"""What a configuration leads to that its author may not expect, though it can be run; and what a
policy is, in a few words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_policy.config.batching import batching_of
from megatron_policy.config.megatron_sections import MegatronConfig
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.config.section import find_differences
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.converters.table import Table
from megatron_policy.parallel.topology import Topology

_OF_EXPERTS = ("moe_", "freeze_moe_router", "expert_tensor_parallel_size")
"""Beginnings of names in megatron_cfg; expert_model_parallel_size is refused."""


def notes_of(config: PolicyConfig, table: Table) -> Iterator[str]:
    """Report, a sentence each, what the author of a configuration may not expect of it."""
    architecture = table.architecture
    configured, positions = config.max_total_sequence_length, architecture.positions
    if configured > positions:
        yield (
            f"rows of more than {positions} tokens are refused: the model has no more positions, "
            f"although max_total_sequence_length is {configured}"
        )
    for training in (True, False):
        batching = batching_of(config, training)
        if batching.kind != "padded" and batching.capacity < min(configured, positions):
            what = "training on" if training else "scoring"
            yield (
                f"{what} rows of more than {batching.capacity} tokens is refused: no microbatch of "
                f"{batching.key}={batching.tokens} holds one, although rows can have "
                f"{min(configured, positions)}"
            )
    if idle := ParamGroups.of_policy(config).freezing.list_idle(table):
        yield f"without effect, since the model has no such part: {', '.join(idle)}"
    if engine_of(config) is not Engine.MEGATRON_CORE:
        return
    megatron = config.megatron_cfg
    iters, warmup = megatron.train_iters, megatron.scheduler.lr_warmup_iters
    if iters is not None and warmup and iters <= warmup:
        yield (
            f"training ends within the warm-up of the learning rate, which takes {warmup} of "
            f"{iters} iterations (scheduler.lr_warmup_iters, train_iters): it never reaches "
            f"lr={megatron.optimizer.lr:g}"
        )
    if architecture.moe is None:
        changed = [name for name, _ in find_differences(megatron, MegatronConfig())]
        names = sorted(name for name in changed if name.startswith(_OF_EXPERTS))
        if names:
            yield f"without effect, since the model has no experts: {', '.join(names)}"


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
