"""`plan --refit`: what handing a checkpoint's weights to an inference engine would move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_policy.cli.options import Dtype, Precision
from megatron_policy.cli.output import CONFIG_ONLY, say, say_json
from megatron_policy.cli.sizes import show_size

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig
    from megatron_policy.convert.headers import Headers
    from megatron_policy.converters.architecture import Architecture
    from megatron_policy.converters.table import Entry, Table
    from megatron_policy.parallel.topology import LayerSplit, Topology
    from megatron_policy.refit.plan import RefitPlan, RefitTensor


def lines(planned: Planned) -> Iterator[str]:
    """Totals, what each stage owns, what is exchanged, and the cost."""
    plan, table, topology = planned.plan, planned.table, planned.topology
    axes = " x ".join(f"{axis} {getattr(topology, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    if table.architecture.moe is not None:
        axes += f", experts ep {topology.ep} x etp {topology.expert_tp}"
    yield (
        f"{table.family}, {table.architecture.num_layers} layers: {_sum(plan.tensors)}, "
        f"on {topology.world_size} rank{'s' * (topology.world_size > 1)} = {axes}"
    )
    if planned.config_only:
        yield CONFIG_ONLY
    yield from _stages(planned)
    yield f"exchange: {_exchange(plan)}" + "; 1 to agree at the end" * (topology.world_size > 1)
    yield f"peak memory of each rank: at most {_peak(plan)}"
    largest = max(plan.tensors, key=lambda tensor: tensor.nbytes)
    yield f"largest tensor: {largest.name}, {show_size(largest.nbytes)}"
    yield from _buckets(plan)


def tensor_lines(planned: Planned) -> Iterator[str]:
    """One line per tensor, in the order in which they are sent."""
    arch = planned.table.architecture
    split = {name: _split(entry, arch) for entry in planned.table.exported() for name in entry.hf}
    number = _bucket_numbers(planned.plan)
    yield "tensors, in the order in which they are sent"
    for tensor in planned.plan.tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield (
            f"  {tensor.name}  {list(tensor.shape)}  {dtype}  {tensor.nbytes:,} bytes  "
            f"stage {tensor.stage}  {split[tensor.name]}  bucket {number[tensor.name]}"
        )


def _split(entry: Entry, arch: Architecture) -> str:
    from megatron_policy.converters.rows.shards import split_dimension

    dim = split_dimension(entry.row, arch)
    how = "held whole" if dim is None else f"split along dimension {dim}"
    return f"{type(entry.row).__name__}, {how} in {entry.megatron}"


def _stages(planned: Planned) -> Iterator[str]:
    from megatron_policy.parallel.topology import ranges

    topology = planned.topology
    per_stage = topology.world_size // topology.pp
    for stage, chunks in enumerate(planned.split.stages):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        layers = [layer for chunk in chunks for layer in chunk]
        owned = [tensor for tensor in planned.plan.tensors if tensor.stage == stage]
        yield (f"  stage {stage}: ranks {ranges(ranks)}, layers {ranges(layers)}, {_sum(owned)}")


def _exchange(plan: RefitPlan) -> str:
    if not plan.gathers:
        return "no collective, every rank holds whole tensors"
    calls = plan.collectives
    return (
        f"{plan.rounds} round{'s' * (plan.rounds > 1)} of {show_size(plan.round_bytes)}, "
        f"{calls} collective{'s' * (calls > 1)} on each rank"
    )


def _peak(plan: RefitPlan) -> str:
    exchange = plan.round_bytes
    bucket = min(plan.bucket_bytes, plan.total_bytes)
    total = exchange + bucket + plan.largest_bytes
    return (
        f"{show_size(total)} = {show_size(exchange)} of the exchange + {show_size(bucket)} of a "
        f"transport's buffers + {show_size(plan.largest_bytes)} of the largest tensor"
    )


def _buckets(plan: RefitPlan) -> Iterator[str]:
    buckets = _in_buckets(plan)
    kinds = {"rounds" if exchange.gathers else "packs" for exchange in plan.exchanges}
    what = " and ".join(sorted(kinds))
    yield f"buckets ({what} of at most {show_size(plan.bucket_bytes)}) and their tensors"
    for number, tensors in enumerate(buckets):
        names = tensors[0].name
        if len(tensors) > 1:
            names += f" to {tensors[-1].name}"
        yield f"  {number}: {len(tensors)} tensor{'s' * (len(tensors) > 1)}, {names}"


def _bucket_numbers(plan: RefitPlan) -> dict[str, str]:
    """By tensor: "3", or "3-5" for one that is spread over several rounds."""
    numbers: dict[str, list[int]] = {}
    for number, tensors in enumerate(_in_buckets(plan)):
        for tensor in tensors:
            numbers.setdefault(tensor.name, []).append(number)
    return {
        name: str(of[0]) if len(of) == 1 else f"{of[0]}-{of[-1]}" for name, of in numbers.items()
    }


def _in_buckets(plan: RefitPlan) -> list[list[RefitTensor]]:
    """The tensors with elements in each round, or in each pack if there is no exchange."""
    from megatron_policy.refit.plan import packed

    buckets = []
    for exchange in plan.exchanges:
        if not exchange.gathers:
            packs = packed(exchange.tensors, plan.bucket_bytes)
            buckets += [list(pack.tensors) for pack in packs]
        for number in range(exchange.rounds):
            found = {item.tensor.name: item.tensor for item, _, _ in exchange.in_round(number)}
            buckets.append(list(found.values()))
    return buckets


def _sum(tensors: Sequence[RefitTensor]) -> str:
    return f"{len(tensors)} tensors, {show_size(sum(tensor.nbytes for tensor in tensors))}"


@dataclass(frozen=True)
class Planned:
    """A refit of a model that is trained under a layout."""

    table: Table
    topology: Topology
    split: LayerSplit
    plan: RefitPlan
    config_only: bool
    """Whether there is no checkpoint, only a config."""


def show_refit(
    source: str,
    sizes: dict[str, Any],
    bucket_bytes: int,
    dtype: Dtype | None,
    precision: Precision,
    tensors: bool,
    as_json: bool,
) -> Planned:
    """Print what a refit of `source` under a layout of these `sizes` would move; return it."""
    planned = _planned(with_config(source), sizes, bucket_bytes, dtype, precision)
    if as_json:
        say_json(_as_data(planned, tensors))
        return planned
    for line in lines(planned):
        say(line)
    for line in tensor_lines(planned) if tensors else ():
        say(line)
    return planned


def _as_data(planned: Planned, tensors: bool) -> dict[str, Any]:
    """The same as JSON: bytes and counts."""
    plan, topology = planned.plan, planned.topology
    axes = ("tp", "cp", "ep", "dp", "pp", "vpp")
    data: dict[str, Any] = {
        "ranks": topology.world_size,
        "layout": {axis: getattr(topology, axis) for axis in axes} | {"etp": topology.expert_tp},
        "tensors": len(plan.tensors),
        "bytes": plan.total_bytes,
        "largest_bytes": plan.largest_bytes,
        "bucket_bytes": plan.bucket_bytes,
        "rounds": plan.rounds if plan.gathers else 0,
        "round_bytes": plan.round_bytes,
        "collectives": plan.collectives if plan.gathers else 0,
    }
    if tensors:
        data["sent"] = [
            {"name": each.name, "bytes": each.nbytes, "stage": each.stage} for each in plan.tensors
        ]
    return data


def with_config(source: str) -> str:
    """The source, or the config.json of a directory that has no weights beside it."""
    from megatron_policy.converters.formats.hf_config import CONFIG
    from megatron_policy.converters.formats.hf_names import holds_weights

    root = Path(source).expanduser()
    if (root / CONFIG).is_file() and not any(holds_weights(f.name) for f in root.iterdir()):
        return str(root / CONFIG)
    return source


def _planned(
    source: str, sizes: dict[str, Any], bucket_bytes: int, dtype: Dtype | None, precision: Precision
) -> Planned:
    from megatron_policy.config.layout import checked_topology, layer_split
    from megatron_policy.convert.headers import read_headers
    from megatron_policy.converters.table import bind
    from megatron_policy.dtypes import dtype_named
    from megatron_policy.refit.planning import RefitModel, plan_refit

    seen = read_headers(source)
    table = bind(seen.config)
    _check(seen, table)
    config = _config(source, sizes, precision)
    ranks = sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes["cp"]
    topology = checked_topology(config, table.architecture, ranks)
    split = layer_split(config, table.architecture, topology)
    trained = dtype_named(precision.value)
    return Planned(
        table,
        topology,
        split,
        plan_refit(
            RefitModel(table, split, seen.dtypes, trained, topology),
            bucket_bytes=bucket_bytes,
            dtype=None if dtype is None else dtype_named(dtype.value),
        ),
        seen.config_only,
    )


def _check(seen: Headers, table: Table) -> None:
    from megatron_policy.errors import ConversionError

    if seen.problems:
        raise ConversionError("; ".join(seen.problems))
    table.check_hf(seen.shapes, seen.dtypes)


def _config(source: str, sizes: dict[str, Any], precision: Precision) -> PolicyConfig:
    """The configuration of a policy with these sizes.

    Nothing else of it matters here, except that some models are only split with sequence
    parallelism.
    """
    from megatron_policy.config import PolicyConfig

    section: dict[str, Any] = {
        "model_name": source,
        "precision": precision.value,
        "train_global_batch_size": sizes["dp"] * sizes["pp"],
        "train_micro_batch_size": 1,
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": sizes["tp"],
            "pipeline_model_parallel_size": sizes["pp"],
            "virtual_pipeline_model_parallel_size": sizes["vpp"],
            "num_layers_in_first_pipeline_stage": sizes["first"],
            "num_layers_in_last_pipeline_stage": sizes["last"],
            "context_parallel_size": sizes["cp"],
            "expert_model_parallel_size": sizes["ep"],
            "expert_tensor_parallel_size": sizes["etp"],
            "sequence_parallel": sizes["tp"] > 1,
        },
    }
    return PolicyConfig.parse(section)
