"""A refit's plan as lines of text; makes none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_policy.cli.sizes import show_size

if TYPE_CHECKING:
    from megatron_policy.cli.plan import Planned
    from megatron_policy.converters.table import Entry
    from megatron_policy.refit.plan import RefitPlan, RefitTensor


def lines(planned: Planned) -> Iterator[str]:
    """Totals, what each stage owns, what is exchanged, and what that takes."""
    plan, table, topology = planned.plan, planned.table, planned.topology
    axes = " x ".join(f"{axis} {getattr(topology, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    yield (
        f"{table.family}, {table.architecture.num_layers} layers: {_sum(plan.tensors)}, "
        f"on {topology.world_size} rank{'s' * (topology.world_size > 1)} = {axes}"
    )
    yield from _stages(planned)
    yield f"exchange: {_exchange(plan)}" + "; 1 to agree at the end" * (topology.world_size > 1)
    yield f"memory at the peak, on each rank: at most {_peak(plan)}"
    largest = max(plan.tensors, key=lambda tensor: tensor.nbytes)
    yield f"largest tensor: {largest.name}, {show_size(largest.nbytes)}"
    yield from _buckets(plan)


def tensor_lines(planned: Planned) -> Iterator[str]:
    """A line for each tensor, in the order in which they come."""
    split = {name: _split(entry) for entry in planned.table.exported() for name in entry.hf}
    number = _bucket_numbers(planned.plan)
    yield "tensors, in the order in which they come"
    for tensor in planned.plan.tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield (
            f"  {tensor.name}  {list(tensor.shape)}  {dtype}  {tensor.nbytes:,} bytes  "
            f"stage {tensor.stage}  {split[tensor.name]}  bucket {number[tensor.name]}"
        )


def _split(entry: Entry) -> str:
    row, dim = entry.row, entry.row.shard_dim
    how = "held whole" if dim is None else f"split along dimension {dim}"
    return f"{type(row).__name__}, {how} in {entry.megatron}"


def _stages(planned: Planned) -> Iterator[str]:
    from megatron_policy.cli.inspect import ranges

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
        f"{plan.rounds} round{'s' * (plan.rounds > 1)} of {show_size(_round(plan))}, "
        f"{calls} collective{'s' * (calls > 1)} on each rank"
    )


def _peak(plan: RefitPlan) -> str:
    exchange = _round(plan) if plan.gathers else 0
    bucket = min(plan.bucket_bytes, plan.total_bytes)
    total = exchange + bucket + plan.largest_bytes
    return (
        f"{show_size(total)} = {show_size(exchange)} of the exchange + {show_size(bucket)} of a "
        f"transport's buffers + {show_size(plan.largest_bytes)} of the largest tensor"
    )


def _round(plan: RefitPlan) -> int:
    return plan.slots * plan.chunk


def _buckets(plan: RefitPlan) -> Iterator[str]:
    buckets = _in_buckets(plan)
    what = "rounds" if plan.gathers else "packs"
    yield f"buckets ({what} of at most {show_size(plan.bucket_bytes)}) and what is in them"
    for number, tensors in enumerate(buckets):
        names = tensors[0].name
        if len(tensors) > 1:
            names += f" to {tensors[-1].name}"
        yield f"  {number}: {len(tensors)} tensor{'s' * (len(tensors) > 1)}, {names}"


def _bucket_numbers(plan: RefitPlan) -> dict[str, str]:
    """By tensor: "3", or "3-5" for one that several rounds carry."""
    numbers: dict[str, list[int]] = {}
    for number, tensors in enumerate(_in_buckets(plan)):
        for tensor in tensors:
            numbers.setdefault(tensor.name, []).append(number)
    return {
        name: str(of[0]) if len(of) == 1 else f"{of[0]}-{of[-1]}" for name, of in numbers.items()
    }


def _in_buckets(plan: RefitPlan) -> list[list[RefitTensor]]:
    """The tensors of which each round, or without an exchange each pack, has elements."""
    from megatron_policy.refit.plan import packed

    if not plan.gathers:
        return [list(pack.tensors) for pack in packed(plan.tensors, plan.bucket_bytes)]
    rounds = []
    for number in range(plan.rounds):
        found = {item.tensor.name: item.tensor for item, _, _ in plan.in_round(number)}
        rounds.append(list(found.values()))
    return rounds


def _sum(tensors: Sequence[RefitTensor]) -> str:
    return f"{len(tensors)} tensors, {show_size(sum(tensor.nbytes for tensor in tensors))}"
