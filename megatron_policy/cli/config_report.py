"""What a configuration comes to on its model and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.cli.output import printable
from megatron_policy.cli.report import CommandReport, layout_data
from megatron_policy.config import PolicyConfig, ignored_keys
from megatron_policy.config.batching import batching_of
from megatron_policy.config.composed import compose
from megatron_policy.config.layout import (
    checked_topology,
    equal_share,
    layer_split,
    microbatches,
    pads,
    topology_of,
)
from megatron_policy.config.notes import notes_of
from megatron_policy.config.parallel_sizes import engine_of, model_copies, parallel_sizes
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.table import Table as ModelTable
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.memory import (
    BatchShape,
    StageMemory,
    kernels_of,
    longest_row,
    stage_memory,
)
from megatron_policy.estimate.sizes import show_gib
from megatron_policy.estimate.states import ModelRows
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

    @property
    def train_step(self) -> str:
        """The samples of a step, and its microbatches on a rank."""
        config, topology = self.config, self.topology
        rows, ranks = config.train_global_batch_size, f"{topology.dp} data-parallel ranks"
        if not pads(config):
            wanted = batching_of(config, training=True)
            how = f"{wanted.kind} microbatches of {wanted.tokens} tokens"
            return f"{rows} samples on {ranks} in {how}"
        size = config.train_micro_batch_size
        rounds = microbatches(rows, size, topology)
        return f"{rows} samples = {ranks} x {rounds} microbatches of {size}"

    @cached_property
    def fullest(self) -> StageMemory:
        """What a training step over rows of full length needs on a rank of the fullest stage."""
        config, topology, arch = self.config, self.topology, self.model.architecture
        kernels = kernels_of(config, arch, accelerated=True)
        shape = BatchShape.of(config, longest_row(config, arch))
        rows = ModelRows.of(self.model)
        stages = (
            stage_memory(config, rows, topology, shape, stage, kernels)
            for stage in range(topology.pp)
        )
        return max(stages, key=lambda stage: stage.peak)

    @property
    def param_groups(self) -> Iterator[tuple[str, int, float]]:
        """How parameters are trained, how many in this way, and their share."""
        groups, arch = ParamGroups.of(self.config.megatron_cfg), self.model.architecture
        groups.check(self.model)
        sizes: dict[str, int] = {}
        for entry in self.model.entries:
            if entry.row.owns and entry.row.learnt:
                how = groups.described(entry)
                sizes[how] = sizes.get(how, 0) + math.prod(entry.row.local_shape(arch, 1))
        total = sum(sizes.values())
        return ((how, size, size / total) for how, size in sizes.items())

    @property
    def stages(self) -> Iterator[tuple[range, tuple[range, ...]]]:
        """Each stage's ranks, and the layers of its chunks."""
        per_stage = self.topology.world_size // self.topology.pp
        split = layer_split(self.config, self.model.architecture, self.topology)
        for stage, chunks in enumerate(split.stages):
            yield range(stage * per_stage, (stage + 1) * per_stage), tuple(chunks)


def check_config(path: Path, overrides: Sequence[str], world_size: int | None) -> CheckedConfig:
    """Read the file's configuration and check that it fits its model and so many ranks, or the
    fewest possible. ConfigError with the nearest numbers of ranks that fit.
    """
    composed = compose(path, overrides)
    config = PolicyConfig.parse(composed.policy)
    table, trained = bind_tables(config)
    ranks = world_size or fewest_ranks(config)
    try:
        topology = checked_topology(config, table.architecture, ranks)
    except ConfigError as error:
        if world_size is None:
            raise
        near = _nearest_world_sizes(config, table.architecture, world_size)
        raise ConfigError(f"{error}{near}") from error
    if not config.megatron_cfg.enabled:
        from megatron_policy.engines.hugging_face.assemble import check_build

        check_build(config, table, topology)
    unused = ignored_keys(composed.policy)
    return CheckedConfig(config, trained, topology, composed.others, unused, world_size is None)


def report_config(checked: CheckedConfig, ignored: bool) -> CommandReport:
    """Report what a configuration comes to, if they are asked for with its `ignored` keys."""
    return CommandReport(partial(_as_data, checked), _tables(checked, ignored))


def _tables(checked: CheckedConfig, ignored: bool) -> Iterator[Table]:
    """The summary, with Megatron-Core the stages, and if they are asked for the ignored keys."""
    summary = _summary(checked)
    if checked.fewest:
        summary.add_row("", "the fewest that hold the layout; give --world-size for another number")
    if checked.on_megatron:
        for number, (how, size, share) in enumerate(checked.param_groups):
            said = f"{size:,} parameters ({share:.1%}) {how}"
            summary.add_row("trained" if number == 0 else "", said)
        computed = checked.fullest.activations + checked.fullest.head
        states = checked.fullest.states
        most = f"{show_gib(computed)} of activations and head"
        if states.step > computed:
            most = f"{show_gib(states.step)} of fp32 gradients in the optimizer's step"
        summary.add_row(
            "memory of a GPU",
            f"{show_gib(checked.fullest.peak)} estimated: {show_gib(states.resident)} of states, "
            f"{most} (`plan` shows all of it)",
        )
    for note in notes_of(checked.config, checked.model):
        summary.add_row("note", note)
    if checked.sections_not_read:
        names = ", ".join(checked.sections_not_read)
        summary.add_row("not read", printable(f"the file's other sections: {names}"))
    if checked.ignored and not ignored:
        summary.add_row("without effect", f"{len(checked.ignored)} keys; --ignored lists them")
    yield summary
    if checked.on_megatron:
        table = Table("stage", "ranks", "layers")
        for stage, (ranks, chunks) in enumerate(checked.stages):
            layers = " and ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks)
            table.add_row(str(stage), f"{ranks.start}-{ranks.stop - 1}", layers)
        yield table
    if ignored:
        table = Table()
        table.add_column("key without effect", overflow="fold")
        table.add_column("why" if checked.ignored else "every key has an effect")
        for path, why in checked.ignored.items():
            table.add_row(printable(path), printable(why))
        yield table


def _as_data(checked: CheckedConfig) -> dict[str, Any]:
    """The same as JSON: counts and bytes."""
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
        "layout": layout_data(topology),
        "train_step": checked.train_step,
        "ranks_that_fit": list(islice(legal_world_sizes(config), SHOWN_SIZES)),
        "notes": list(notes_of(config, checked.model)),
        "sections_not_read": checked.sections_not_read,
        "ignored": dict(checked.ignored),
        "trained": None,
        "memory": None,
        "stages": None,
    }
    if checked.on_megatron:
        fullest = checked.fullest
        data["trained"] = [
            {"parameters": size, "how": how} for how, size, _ in checked.param_groups
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
            for ranks, chunks in checked.stages
        ]
    return data


def fewest_ranks(config: PolicyConfig) -> int:
    """The fewest ranks that hold whole replicas and all experts; legal numbers are multiples."""
    sizes = parallel_sizes(config)
    experts = sizes.ep * (sizes.tp if sizes.etp is None else sizes.etp)
    return math.lcm(sizes.tp * sizes.cp * sizes.replicas, experts) * sizes.pp


def _summary(checked: CheckedConfig) -> Table:
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
    table.add_row("train step", checked.train_step)
    table.add_row("ranks that fit", show_sizes(legal_world_sizes(config)))
    return table


def legal_world_sizes(config: PolicyConfig) -> Iterator[int]:
    """Numbers of ranks over which the global batch divides, in increasing order."""
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


def _nearest_world_sizes(config: PolicyConfig, architecture: Architecture, wanted: int) -> str:
    """A line of a refusal: the numbers of ranks next to `wanted` that fit; "" if neither does."""
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


def show_sizes(sizes: Iterator[int]) -> str:
    """The first few sizes, and whether there are more; the rest is not computed."""
    shown = ", ".join(str(size) for size in islice(sizes, SHOWN_SIZES))
    return shown if next(sizes, None) is None else f"{shown}, ..."
