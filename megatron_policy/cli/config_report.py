"""What a configuration comes to on its model and ranks, as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from megatron_policy.cli.output import printable

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_policy.config import PolicyConfig
    from megatron_policy.converters.architecture import Architecture
    from megatron_policy.converters.table import Table as ModelTable
    from megatron_policy.estimate.memory import StageMemory
    from megatron_policy.parallel.topology import Topology

SHOWN_SIZES = 8
_AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration that fits its model and these ranks."""

    config: PolicyConfig
    model: ModelTable
    topology: Topology
    sections_not_read: tuple[str, ...]
    ignored: Mapping[str, str]
    """Keys below `policy` without effect, and why."""
    fewest: bool
    """Whether nobody has said how many ranks there are: these are the fewest."""

    @property
    def on_megatron(self) -> bool:
        """Whether Megatron-Core computes it, whose stages and memory are known."""
        return self.config.megatron_cfg.enabled


def tables(checked: CheckedConfig, ignored: bool = False) -> Iterator[Table]:
    """The summary, with Megatron-Core the stages, and if they are asked for the ignored keys."""
    from megatron_policy.config.notes import notes_of

    summary = _summary(checked)
    if checked.fewest:
        summary.add_row("", "the fewest that hold the layout; give --world-size for another number")
    if checked.on_megatron:
        for number, (how, size, share) in enumerate(_param_groups(checked)):
            said = f"{size:,} parameters ({share:.1%}) {how}"
            summary.add_row("trained" if number == 0 else "", said)
        summary.add_row("memory of a GPU", _memory(checked))
    for note in notes_of(checked.config, checked.model.architecture):
        summary.add_row("note", note)
    if checked.sections_not_read:
        names = ", ".join(checked.sections_not_read)
        summary.add_row("not read", printable(f"the file's other sections: {names}"))
    if checked.ignored and not ignored:
        summary.add_row("without effect", f"{len(checked.ignored)} keys; --ignored lists them")
    yield summary
    if checked.on_megatron:
        yield _stages(checked)
    if ignored:
        yield _ignored(checked.ignored)


def as_data(checked: CheckedConfig) -> dict[str, Any]:
    """The same as JSON: counts and bytes."""
    from megatron_policy.config.notes import notes_of
    from megatron_policy.config.parallel_sizes import engine_of

    config, topology, shape = checked.config, checked.topology, checked.model.architecture
    data: dict[str, Any] = {
        "model": config.model_name,
        "reference": config.reference_model_name,
        "engine": engine_of(config).name.lower(),
        "precision": config.precision,
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.mixer.num_attention_heads,
        "num_query_groups": shape.mixer.num_query_groups,
        "hidden_size": shape.hidden_size,
        "num_experts": None if shape.moe is None else shape.moe.experts,
        "ranks": topology.world_size,
        "layout": {axis: getattr(topology, axis) for axis in ("tp", "cp", "ep", "dp", "pp", "vpp")}
        | {"etp": topology.expert_tp},
        "train_step": _train_step(checked),
        "ranks_that_fit": list(islice(legal_world_sizes(config), SHOWN_SIZES)),
        "notes": list(notes_of(config, shape)),
        "sections_not_read": checked.sections_not_read,
        "ignored": dict(checked.ignored),
        "trained": None,
        "memory": None,
        "stages": None,
    }
    if checked.on_megatron:
        fullest = _fullest(checked)
        data["trained"] = [
            {"parameters": size, "how": how} for how, size, _ in _param_groups(checked)
        ]
        data["memory"] = {
            "peak_bytes": fullest.peak,
            "states_bytes": fullest.states.resident,
            "activation_bytes": fullest.activations,
            "head_bytes": fullest.head,
            "step_bytes": fullest.states.step,
        }
        data["stages"] = [
            {"ranks": list(ranks), "layers": [layer for chunk in chunks for layer in chunk]}
            for ranks, chunks in _stage_ranks(checked)
        ]
    return data


def _ignored(keys: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("key without effect", overflow="fold")
    table.add_column("why" if keys else "every key has an effect")
    for path, why in keys.items():
        table.add_row(printable(path), printable(why))
    return table


def fewest_ranks(config: PolicyConfig) -> int:
    """The fewest ranks that hold whole replicas and all experts; legal numbers are multiples."""
    from megatron_policy.config.parallel_sizes import parallel_sizes

    sizes = parallel_sizes(config)
    experts = sizes.ep * (sizes.tp if sizes.etp is None else sizes.etp)
    return math.lcm(sizes.tp * sizes.cp * sizes.replicas, experts) * sizes.pp


def _summary(checked: CheckedConfig) -> Table:
    from rich.table import Table

    from megatron_policy.config.parallel_sizes import engine_of, model_copies

    config, topology, architecture = checked.config, checked.topology, checked.model.architecture
    axes = " x ".join(f"{axis}={getattr(topology, axis)}" for axis in _AXES)
    table = Table(show_header=False, box=None)
    table.add_row("model", printable(config.model_name))
    if config.reference_model_name is not None:
        table.add_row("reference", printable(config.reference_model_name))
    table.add_row(
        "shape",
        f"{architecture.num_layers} layers, {architecture.mixer.num_attention_heads} heads in "
        f"{architecture.mixer.num_query_groups} groups, width {architecture.hidden_size}",
    )
    table.add_row("precision", config.precision)
    if not config.megatron_cfg.enabled:
        copies, way = model_copies(config, topology.world_size), engine_of(config).name
        table.add_row("engine", f"transformers under {way}, {copies} x the whole model in shards")
        if config.dtensor_cfg.enabled and checked.sections_not_read:
            table.add_row("", "NeMo RL's own worker trains it, except under `run --workers all`")
    table.add_row("ranks", f"{topology.world_size} = {axes}")
    if (moe := architecture.moe) is not None:
        table.add_row(
            "experts",
            f"{moe.experts} over ep={topology.ep} x etp={topology.expert_tp}, "
            f"{moe.experts // topology.ep} on a rank, each on edp={topology.edp} ranks of a stage",
        )
    table.add_row("train step", _train_step(checked))
    table.add_row("ranks that fit", listed(legal_world_sizes(config)))
    return table


def _param_groups(checked: CheckedConfig) -> list[tuple[str, int, float]]:
    """How parameters are trained, how many in this way, and their share."""
    from megatron_policy.config.param_groups import ParamGroups

    groups, arch = ParamGroups.of(checked.config.megatron_cfg), checked.model.architecture
    groups.check(checked.model)
    sizes: dict[str, int] = {}
    for entry in checked.model.entries:
        if entry.row.owns and entry.row.learnt and not entry.row.keeps_dtype:
            how = groups.described(entry)
            sizes[how] = sizes.get(how, 0) + math.prod(entry.row.local_shape(arch, 1))
    total = sum(sizes.values())
    return [(how, size, size / total) for how, size in sizes.items()]


def _fullest(checked: CheckedConfig) -> StageMemory:
    """What a training step over rows of full length needs on a rank of the fullest stage."""
    from megatron_policy.estimate.memory import (
        BatchShape,
        kernels_of,
        longest_row,
        stage_memory,
    )
    from megatron_policy.estimate.states import ModelRows

    config, topology, arch = checked.config, checked.topology, checked.model.architecture
    kernels = kernels_of(config, arch, accelerated=True)
    shape = BatchShape.of(config, longest_row(config, arch))
    rows = ModelRows.of(checked.model)
    stages = [
        stage_memory(config, rows, topology, shape, stage, kernels) for stage in range(topology.pp)
    ]
    return max(stages, key=lambda stage: stage.peak)


def _memory(checked: CheckedConfig) -> str:
    from megatron_policy.cli.sizes import show_gib

    fullest = _fullest(checked)
    computed, step = fullest.activations + fullest.head, fullest.states.step
    most = f"{show_gib(computed)} of activations and head"
    if step > computed:
        most = f"{show_gib(step)} of fp32 gradients in the optimizer's step"
    return (
        f"{show_gib(fullest.peak)} estimated: {show_gib(fullest.states.resident)} of states, "
        f"{most} (`plan` shows all of it)"
    )


def _train_step(checked: CheckedConfig) -> str:
    from megatron_policy.config.batching import batching_of
    from megatron_policy.config.layout import microbatches, pads

    config, topology = checked.config, checked.topology
    rows, ranks = config.train_global_batch_size, f"{topology.dp} data-parallel ranks"
    if not pads(config):
        wanted = batching_of(config, training=True)
        return f"{rows} samples on {ranks} in {wanted.kind} microbatches of {wanted.tokens} tokens"
    rounds = microbatches(rows, config.train_micro_batch_size, topology)
    return f"{rows} samples = {ranks} x {rounds} microbatches of {config.train_micro_batch_size}"


def legal_world_sizes(config: PolicyConfig) -> Iterator[int]:
    """Numbers of ranks over which the global batch divides, in increasing order."""
    from megatron_policy.config.layout import equal_share, microbatches, pads, topology_of
    from megatron_policy.errors import ConfigError

    fewest = fewest_ranks(config)
    for number in range(1, config.train_global_batch_size + 1):
        topology = topology_of(config, fewest * number)
        rows = config.train_global_batch_size
        try:
            if pads(config):
                microbatches(rows, config.train_micro_batch_size, topology)
            else:
                equal_share(rows, topology)
        except ConfigError:
            continue
        yield topology.world_size


def nearest_world_sizes(config: PolicyConfig, architecture: Architecture, wanted: int) -> str:
    """A line of a refusal: the numbers of ranks next to `wanted` that fit; "" if neither does."""
    from megatron_policy.config.layout import checked_topology
    from megatron_policy.errors import ConfigError

    legal = list(legal_world_sizes(config))
    below = max((size for size in legal if size < wanted), default=None)
    above = min((size for size in legal if size > wanted), default=None)
    fitting = []
    for size in (below, above):
        with suppress(ConfigError):
            if size is not None:
                fitting.append(checked_topology(config, architecture, size).world_size)
    if not fitting:
        return ""
    return f"\nthe nearest --world-size that fits is {' or '.join(map(str, fitting))}"


def listed(sizes: Iterator[int]) -> str:
    """The first few sizes, and whether there are more; the rest is not computed."""
    shown = ", ".join(str(size) for size in islice(sizes, SHOWN_SIZES))
    return shown if next(sizes, None) is None else f"{shown}, ..."


def _stages(checked: CheckedConfig) -> Table:
    from rich.table import Table

    table = Table("stage", "ranks", "layers")
    for stage, (ranks, chunks) in enumerate(_stage_ranks(checked)):
        layers = " and ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks)
        table.add_row(str(stage), f"{ranks.start}-{ranks.stop - 1}", layers)
    return table


def _stage_ranks(checked: CheckedConfig) -> Iterator[tuple[range, tuple[range, ...]]]:
    """Each stage's ranks, and the layers of its chunks."""
    from megatron_policy.config.layout import layer_split

    topology = checked.topology
    per_stage = topology.world_size // topology.pp
    split = layer_split(checked.config, checked.model.architecture, topology)
    for stage, chunks in enumerate(split.stages):
        yield range(stage * per_stage, (stage + 1) * per_stage), tuple(chunks)
