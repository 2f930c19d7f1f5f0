"""`plan --refit`: what handing a checkpoint's weights to an inference engine would move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megatron_policy.cli.options import Dtype, Precision, parse_size
from megatron_policy.cli.output import CONFIG_ONLY
from megatron_policy.cli.plan_links import links_as_data, show_links
from megatron_policy.cli.report import CommandReport, layout_data
from megatron_policy.config.layout import checked_topology, layer_split
from megatron_policy.config.parallel_sizes import keys_of_sizes
from megatron_policy.config.policy_config import PolicyConfig, least_section
from megatron_policy.convert.headers import open_headers
from megatron_policy.converters.formats.hf_config import CONFIG
from megatron_policy.converters.formats.hf_names import holds_weights
from megatron_policy.converters.rows.shards import split_dimension
from megatron_policy.converters.table import Table
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.sizes import show_size
from megatron_policy.parallel.topology import LayerSplit, Topology, ranges
from megatron_policy.refit.deltas.codec import expect_bytes
from megatron_policy.refit.links import LinkTraffic, Machine
from megatron_policy.refit.plan import RefitPlan, RefitTensor, pack_tensors
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.shards import ShardPlan, place_on_grid, plan_shards

_ENGINE_AXES = ("tp", "pp", "dp", "ep", "etp")


@dataclass(frozen=True)
class PlannedRefit:
    """A refit of a model that is trained under a layout."""

    table: Table
    topology: Topology
    split: LayerSplit
    plan: RefitPlan
    config_only: bool
    """Whether there is no checkpoint, only a config."""
    engine: Topology | None = None
    shards: ShardPlan | None = None
    """The engine's grid, and what is sent from shards to its shards."""
    machine: Machine | None = None
    """Whose links are used, if what goes over each of them is wanted."""
    changed: float | None = None
    """The share of all elements that a refit of what has changed sends, if that is wanted."""

    @property
    def element_bytes(self) -> Mapping[torch.dtype, float]:
        """What is expected to be sent for each element of each dtype if those that have changed are
        in random places, without headers.
        """
        assert self.changed is not None
        dtypes = {tensor.dtype for tensor in self.plan.tensors}
        return {dtype: expect_bytes(self.changed, dtype.itemsize) for dtype in dtypes}

    @property
    def changed_bytes(self) -> int:
        """What is expected to be sent of what has changed."""
        of = self.element_bytes
        return round(sum(t.nbytes / t.dtype.itemsize * of[t.dtype] for t in self.plan.tensors))

    def trace_links(self, pairs: Mapping[tuple[int, int], float]) -> LinkTraffic | None:
        """What goes over the machine's links of these bytes from trainers to engine ranks."""
        if self.machine is None or self.engine is None:
            return None
        return LinkTraffic(self.machine, self.topology.world_size, self.engine.world_size, pairs)


def report_refit(planned: PlannedRefit, tensors: bool) -> CommandReport:
    """Report what a refit would move, if wanted with each of its `tensors`."""
    listed = _tensor_lines(planned) if tensors else ()
    return CommandReport(lambda: _as_data(planned, tensors), chain(_lines(planned), listed))


def _lines(planned: PlannedRefit) -> Iterator[str]:
    """Totals, what each stage owns, what is exchanged, and the cost."""
    plan, table, topology = planned.plan, planned.table, planned.topology
    yield (
        f"{table.family}, {table.architecture.num_layers} layers: {_sum(plan.tensors)}, "
        f"on {_name_ranks(table, topology)}"
    )
    if planned.config_only:
        yield CONFIG_ONLY
    per_stage = topology.world_size // topology.pp
    for stage, chunks in enumerate(planned.split.stages):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        layers = [layer for chunk in chunks for layer in chunk]
        owned = [tensor for tensor in plan.tensors if tensor.stage == stage]
        yield f"  stage {stage}: ranks {ranges(ranks)}, layers {ranges(layers)}, {_sum(owned)}"
    yield from _cost(plan, topology.world_size)
    if planned.engine is not None and planned.shards is not None:
        yield f"to an engine on {_name_ranks(table, planned.engine)}, shard to shard:"
        yield from _shard_lines(planned.shards)
        yield from show_links(planned.trace_links(planned.shards.link_bytes))
    if planned.changed is not None:
        yield from _delta_lines(planned)
    what = " and ".join(sorted({"rounds" if e.gathers else "packs" for e in plan.exchanges}))
    yield f"buckets ({what} of at most {show_size(plan.bucket_bytes)}) and their tensors"
    for number, tensors in enumerate(_in_buckets(plan)):
        names = tensors[0].name
        if len(tensors) > 1:
            names += f" to {tensors[-1].name}"
        yield f"  {number}: {len(tensors)} tensor{'s' * (len(tensors) > 1)}, {names}"


def _delta_lines(planned: PlannedRefit) -> Iterator[str]:
    """What is sent of what has changed, to an engine rank and in which time."""
    share = planned.changed_bytes / planned.plan.total_bytes
    yield (
        f"where {planned.changed:.4g} of all elements has changed, in random places: about "
        f"{show_size(planned.changed_bytes)}, {share:.1%} of all bytes"
    )
    if planned.shards is None:
        return
    pairs = planned.shards.scale_links(planned.element_bytes)
    received: defaultdict[int, float] = defaultdict(float)
    for (_, target), nbytes in pairs.items():
        received[target] += nbytes
    most = round(max(received.values()))
    yield f"  to an engine rank, from shards to its shards, about {show_size(most)} at most"
    yield from show_links(planned.trace_links(pairs))


def _name_ranks(table: Table, grid: Topology) -> str:
    axes = " x ".join(f"{axis} {getattr(grid, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    if table.architecture.moe is not None:
        axes += f", experts ep {grid.ep} x etp {grid.expert_tp}"
    return f"{grid.world_size} rank{'s' * (grid.world_size > 1)} = {axes}"


def _shard_lines(shards: ShardPlan) -> Iterator[str]:
    """What each rank sends and receives."""
    sent, received, links = shards.sent, shards.received, shards.link_bytes
    (source, target), most = max(links.items(), key=lambda link: link[1])
    yield (
        f"  each engine rank receives what it has, {show_size(max(received))} at most, "
        f"{show_size(min(received))} at least"
    )
    yield (
        f"  each trainer sends {show_size(sum(sent) // len(sent))} on average, "
        f"{show_size(max(sent))} at most (rank {sent.index(max(sent))})"
    )
    yield (
        f"  {len(shards.transfers)} transfers between {len(links)} pairs of ranks, at most "
        f"{show_size(most)} (from rank {source} to engine rank {target})"
    )
    kept = shards.kept_bytes
    yield (
        f"  deltas to shards: at most {show_size(max(kept))} of host memory of a trainer (rank "
        f"{kept.index(max(kept))}), of what it has sent to each engine rank"
    )


def _cost(plan: RefitPlan, ranks: int) -> Iterator[str]:
    """What is exchanged, and the memory that it takes."""
    exchange = "no collective, every rank holds whole tensors"
    if plan.gathers:
        calls = plan.collectives
        exchange = (
            f"{plan.rounds} round{'s' * (plan.rounds > 1)} of {show_size(plan.round_bytes)}, "
            f"{calls} collective{'s' * (calls > 1)} on each rank"
        )
    yield f"exchange: {exchange}" + "; 1 to agree at the end" * (ranks > 1)
    bucket = min(plan.bucket_bytes, plan.total_bytes)
    yield (
        f"peak memory of each rank: at most "
        f"{show_size(plan.round_bytes + bucket + plan.largest_bytes)} = "
        f"{show_size(plan.round_bytes)} of the exchange + {show_size(bucket)} of a transport's "
        f"buffers + {show_size(plan.largest_bytes)} of the largest tensor"
    )
    kept, exchanged = plan.snapshot_bytes, plan.in_rounds.round_bytes
    yield (
        f"detached: about {show_size(kept + exchanged)} of host memory of each rank = "
        f"{show_size(kept)} of what it sends + {show_size(exchanged)} of the exchange"
    )
    yield (
        f"deltas: at most {show_size(plan.kept_bytes)} of host memory of each rank, of what it has "
        "sent"
    )
    largest = max(plan.tensors, key=lambda tensor: tensor.nbytes)
    yield f"largest tensor: {largest.name}, {show_size(largest.nbytes)}"


def _tensor_lines(planned: PlannedRefit) -> Iterator[str]:
    """One line per tensor, in the order in which they are sent, with the bucket or those over which
    it is spread.
    """
    split: dict[str, str] = {}
    for entry in planned.table.exported():
        dim = split_dimension(entry.row, planned.table.architecture)
        how = "held whole" if dim is None else f"split along dimension {dim}"
        row = f"{type(entry.row).__name__}, {how} in {entry.megatron}"
        split |= dict.fromkeys(entry.hf, row)
    numbers: dict[str, list[int]] = {}
    for number, tensors in enumerate(_in_buckets(planned.plan)):
        for tensor in tensors:
            numbers.setdefault(tensor.name, []).append(number)
    yield "tensors, in the order in which they are sent"
    for tensor in planned.plan.tensors:
        first, *_, last = (*numbers[tensor.name], numbers[tensor.name][-1])
        dtype = name_dtype(tensor.dtype)
        yield (
            f"  {tensor.name}  {list(tensor.shape)}  {dtype}  {tensor.nbytes:,} bytes  "
            f"stage {tensor.stage}  {split[tensor.name]}  "
            f"bucket {first if first == last else f'{first}-{last}'}"
        )


def _in_buckets(plan: RefitPlan) -> list[list[RefitTensor]]:
    """The tensors with elements in each round, or in each pack if there is no exchange."""
    buckets = []
    for exchange in plan.exchanges:
        if not exchange.gathers:
            packs = pack_tensors(exchange.tensors, plan.bucket_bytes)
            buckets += [list(pack.tensors) for pack in packs]
        for number in range(exchange.rounds):
            found = {item.tensor.name: item.tensor for item, _, _ in exchange.in_round(number)}
            buckets.append(list(found.values()))
    return buckets


def _sum(tensors: Sequence[RefitTensor]) -> str:
    return f"{len(tensors)} tensors, {show_size(sum(tensor.nbytes for tensor in tensors))}"


def _as_data(planned: PlannedRefit, tensors: bool) -> dict[str, Any]:
    """The same as JSON: bytes and counts."""
    plan, topology = planned.plan, planned.topology
    data: dict[str, Any] = {
        "ranks": topology.world_size,
        "layout": layout_data(topology),
        "tensors": len(plan.tensors),
        "bytes": plan.total_bytes,
        "largest_bytes": plan.largest_bytes,
        "bucket_bytes": plan.bucket_bytes,
        "rounds": plan.rounds if plan.gathers else 0,
        "round_bytes": plan.round_bytes,
        "detached": {
            "snapshot_bytes": plan.snapshot_bytes,
            "round_bytes": plan.in_rounds.round_bytes,
        },
        "deltas": {"kept_bytes": plan.kept_bytes},
        "collectives": plan.collectives if plan.gathers else 0,
    }
    if planned.changed is not None:
        data["deltas"] |= {"changed": planned.changed, "sent_bytes": planned.changed_bytes}
        if planned.shards is not None:
            pairs = planned.shards.scale_links(planned.element_bytes)
            data["deltas"] |= links_as_data(planned.trace_links(pairs))
    if planned.shards is not None:
        shards = planned.shards
        data["shards"] = {
            "transfers": len(shards.transfers),
            "pairs": len(shards.link_bytes),
            "sent_bytes": shards.sent,
            "received_bytes": shards.received,
            "kept_bytes": shards.kept_bytes,
        } | links_as_data(planned.trace_links(shards.link_bytes))
    if tensors:
        data["sent"] = [
            {"name": each.name, "bytes": each.nbytes, "stage": each.stage} for each in plan.tensors
        ]
    return data


def with_config(source: str) -> str:
    """The source, or the config.json of a directory that has no weights beside it."""
    root = Path(source).expanduser()
    if (root / CONFIG).is_file() and not any(holds_weights(f.name) for f in root.iterdir()):
        return str(root / CONFIG)
    return source


def refit_of(
    source: str,
    sizes: Mapping[str, Any],
    ranks: int,
    bucket_bytes: int | None,
    dtype: Dtype | None,
    precision: Precision,
    engine_layout: str | None,
    machine: Machine | None = None,
    changed: float | None = None,
) -> PlannedRefit:
    """Plan a refit of `source` under a layout of these `sizes` over so many `ranks`, and to the
    shards of an engine with that layout, if there is one, over the links of that `machine`, if
    there is one; and, if told, one of the share of all elements that has `changed`.
    """
    source = with_config(source)
    seen, table = open_headers(source)
    # Nothing else of it matters here, except that some models are only split with sequence
    # parallelism.
    section = least_section(source, precision.value, ranks, keys_of_sizes(sizes))
    config = PolicyConfig.parse(section)
    topology = checked_topology(config, table.architecture, ranks)
    split = layer_split(config, table.architecture, topology)
    model = RefitModel(table, split, seen.dtypes, dtype_named(precision.value), topology)
    plan = plan_refit(
        model,
        bucket_bytes=parse_size("512MiB") if bucket_bytes is None else bucket_bytes,
        dtype=None if dtype is None else dtype_named(dtype.value),
    )
    planned = PlannedRefit(table, topology, split, plan, seen.config_only, changed=changed)
    if engine_layout is None:
        return planned
    engine, architecture = parse_grid(engine_layout), table.architecture
    try:
        placements = place_on_grid(plan, architecture, engine)
    except ValueError as error:
        raise ConfigError(f"--engine-layout {engine_layout}: {error}") from error
    shards = plan_shards(plan, architecture, topology, placements, engine.world_size)
    return replace(planned, engine=engine, shards=shards, machine=machine)


def parse_grid(sizes: str) -> Topology:
    """The grid of an engine's ranks from `tp=8,dp=2`; ConfigError for anything else."""
    given: dict[str, int] = {}
    for axis, _, size in (each.partition("=") for each in sizes.split(",")):
        if axis not in _ENGINE_AXES or axis in given or not size.isdecimal():
            raise ConfigError(
                f"--engine-layout {sizes}: give sizes of {', '.join(_ENGINE_AXES)}, each once, as "
                "in tp=8,dp=2"
            )
        given[axis] = int(size)
    try:
        return Topology(**given)
    except ConfigError as error:
        raise ConfigError(f"--engine-layout {sizes}: {error}") from error
