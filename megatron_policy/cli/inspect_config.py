"""`inspect-config`: checks that a configuration fits its model and ranks, and shows who
holds what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_policy.cli.failures import MISUNDERSTOOD, one_line_errors
from megatron_policy.cli.output import printable

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_policy.config import PolicyConfig
    from megatron_policy.converters.architecture import Architecture
    from megatron_policy.converters.table import Table as ModelTable
    from megatron_policy.parallel.topology import Topology

SHOWN_SIZES = 8


def inspect_config(
    path: Annotated[Path, typer.Argument(help="A YAML file with a `policy` section.")],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; the fewest possible if not given.")
    ] = None,
) -> None:
    """Check a configuration against its model, and show which rank holds what and what fits."""
    from rich.console import Console

    from megatron_policy.config import PolicyConfig
    from megatron_policy.config.layout import check_layout, topology_of

    with one_line_errors(MISUNDERSTOOD):
        config = PolicyConfig.from_yaml(path)
        topology = topology_of(config, world_size or fewest_ranks(config))
        model = _table(config)
        architecture = model.architecture
        check_layout(config, architecture, topology)
        groups = list(_param_groups(config, model)) if config.megatron_cfg.enabled else []
    console = Console(highlight=False)
    summary = _summary(config, architecture, topology)
    if world_size is None:
        summary.add_row("", "the fewest that hold the layout; give --world-size for another number")
    for number, line in enumerate(groups):
        summary.add_row("trained" if number == 0 else "", line)
    if config.megatron_cfg.enabled:
        summary.add_row("memory of a GPU", _memory(config, model, topology))
    console.print(summary)
    if config.megatron_cfg.enabled:
        console.print(_stages(config, architecture, topology))


def fewest_ranks(config: PolicyConfig) -> int:
    """The fewest ranks that hold whole replicas and all experts; legal numbers are multiples."""
    from megatron_policy.config.parallel_sizes import parallel_sizes

    sizes = parallel_sizes(config)
    experts = sizes.ep * (sizes.tp if sizes.etp is None else sizes.etp)
    return math.lcm(sizes.tp * sizes.cp * sizes.replicas, experts) * sizes.pp


def _table(config: PolicyConfig) -> ModelTable:
    from megatron_policy.config.adapters import trained_table

    return trained_table(config)


def _summary(config: PolicyConfig, architecture: Architecture, topology: Topology) -> Table:
    from rich.table import Table

    from megatron_policy.config.parallel_sizes import engine_of, model_copies

    axes = " x ".join(f"{axis}={getattr(topology, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    table = Table(show_header=False, box=None)
    table.add_row("model", printable(config.model_name))
    if config.reference_model_name is not None:
        table.add_row("reference", printable(config.reference_model_name))
    table.add_row(
        "shape",
        f"{architecture.num_layers} layers, {architecture.num_attention_heads} heads in "
        f"{architecture.num_query_groups} groups, width {architecture.hidden_size}",
    )
    table.add_row("precision", config.precision)
    if not config.megatron_cfg.enabled:
        copies, way = model_copies(config, topology.world_size), engine_of(config).name
        table.add_row("engine", f"transformers under {way}, {copies} x the whole model in shards")
    table.add_row("ranks", f"{topology.world_size} = {axes}")
    if (moe := architecture.moe) is not None:
        table.add_row(
            "experts",
            f"{moe.experts} over ep={topology.ep} x etp={topology.expert_tp}, "
            f"{moe.experts // topology.ep} on a rank, each on edp={topology.edp} ranks of a stage",
        )
    table.add_row("train step", _train_step(config, topology))
    table.add_row("ranks that fit", _listed(_legal_world_sizes(config)))
    return table


def _param_groups(config: PolicyConfig, model: ModelTable) -> Iterator[str]:
    """How many parameters are trained in which way."""
    from megatron_policy.config.param_groups import ParamGroups

    groups, arch = ParamGroups.of(config.megatron_cfg), model.architecture
    groups.check(model)
    sizes: dict[str, int] = {}
    for entry in model.entries:
        if entry.row.owns and entry.row.learnt and not entry.row.keeps_dtype:
            how = groups.described(entry)
            sizes[how] = sizes.get(how, 0) + math.prod(entry.row.local_shape(arch, 1))
    total = sum(sizes.values())
    for how, size in sizes.items():
        yield f"{size:,} parameters ({size / total:.1%}) {how}"


def _memory(config: PolicyConfig, model: ModelTable, topology: Topology) -> str:
    """The most that a training step over rows of full length needs on a rank."""
    from megatron_policy.cli.sizes import show_gib
    from megatron_policy.estimate.memory import BatchShape, kernels_of, stage_memory
    from megatron_policy.estimate.states import ModelRows

    kernels = kernels_of(config, model.architecture, accelerated=True)
    shape, rows = BatchShape.of(config), ModelRows.of(model)
    stages = [
        stage_memory(config, rows, topology, shape, stage, kernels) for stage in range(topology.pp)
    ]
    fullest = max(stages, key=lambda stage: stage.peak)
    computed, step = fullest.activations + fullest.head, fullest.states.step
    most = f"{show_gib(computed)} of activations and head"
    if step > computed:
        most = f"{show_gib(step)} of fp32 gradients in the optimizer's step"
    return (
        f"{show_gib(fullest.peak)} estimated: {show_gib(fullest.states.resident)} of states, "
        f"{most} (`plan` shows all of it)"
    )


def _train_step(config: PolicyConfig, topology: Topology) -> str:
    from megatron_policy.config.batching import batching_of
    from megatron_policy.config.layout import microbatches, pads

    rows, ranks = config.train_global_batch_size, f"{topology.dp} data-parallel ranks"
    if not pads(config):
        wanted = batching_of(config, training=True)
        return f"{rows} samples on {ranks} in {wanted.kind} microbatches of {wanted.tokens} tokens"
    rounds = microbatches(rows, config.train_micro_batch_size, topology)
    return f"{rows} samples = {ranks} x {rounds} microbatches of {config.train_micro_batch_size}"


def _legal_world_sizes(config: PolicyConfig) -> Iterator[int]:
    """Numbers of ranks over which the global batch divides, if it must, in increasing order."""
    from megatron_policy.config.layout import microbatches, pads, topology_of
    from megatron_policy.errors import ConfigError

    fewest = fewest_ranks(config)
    for number in range(1, config.train_global_batch_size + 1):
        topology = topology_of(config, fewest * number)
        try:
            if pads(config):
                microbatches(
                    config.train_global_batch_size, config.train_micro_batch_size, topology
                )
        except ConfigError:
            continue
        yield topology.world_size


def _listed(sizes: Iterator[int]) -> str:
    """The first few sizes, and whether there are more; the rest is not computed."""
    shown = ", ".join(str(size) for size in islice(sizes, SHOWN_SIZES))
    return shown if next(sizes, None) is None else f"{shown}, ..."


def _stages(config: PolicyConfig, architecture: Architecture, topology: Topology) -> Table:
    from rich.table import Table

    from megatron_policy.config.layout import layer_split

    table = Table("stage", "ranks", "layers")
    per_stage = topology.world_size // topology.pp
    for stage, chunks in enumerate(layer_split(config, architecture, topology).stages):
        layers = " and ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks)
        first = stage * per_stage
        table.add_row(str(stage), f"{first}-{first + per_stage - 1}", layers)
    return table
