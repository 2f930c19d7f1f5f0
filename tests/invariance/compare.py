"""How far what the ranks of a cell saw is from the oracle; knows neither layouts nor how it was
computed.

Shapes: B rows, S positions, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Moe
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.rows import fill_shard
from tests.exact import ROOM
from tests.invariance.cases import CANDIDATES, Cell
from tests.invariance.losses import counts
from tests.invariance.oracle import Reading, Truth

QUANTITIES = (
    "loss",
    "metrics",
    "grad norm",
    "weights",
    "logprobs before",
    "logprobs after",
    "reference",
    "top-k",
    "entropy",
)
"""Losses and gradient norms relative to the oracle's; metrics, too, where they are larger than 1;
everything else absolute.
"""

Results = Sequence[Mapping[str, Any]]


def differences(
    cell: Cell,
    path: Path,
    data: BatchedDataDict,
    truth: Truth,
    rounding: Mapping[str, float],
    results: Results,
) -> dict[str, float]:
    """The worst difference of each quantity over all ranks, rows and steps; not a number where
    anything is not. AssertionError for what no tolerance excuses.
    """
    assert_complete(cell, data, results)
    return {
        "loss": _worst(_losses(truth, results)),
        "metrics": _worst(_metrics(cell, data, truth, results)),
        "grad norm": _worst(
            relative(step["grad_norm"].item(), norm)
            for seen in results
            for step, norm in zip(seen["steps"], truth.grad_norms, strict=True)
        ),
        "weights": _worst(_weights(cell, path, truth, results)),
        "logprobs before": _read(results, "before", truth.before.logprobs_BS),
        "logprobs after": _read(results, "after", truth.after.logprobs_BS),
        "reference": _read(results, "reference", truth.before.logprobs_BS),
        "top-k": _worst(_candidates(truth.before, data, ROOM * rounding["top-k"], results)),
        "entropy": _read(results, "entropy", truth.before.entropy_BS),
    }


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def _worst(values: Iterable[float]) -> float:
    """The largest; not a number if one is not, which `max` would pass over."""
    found = list(values)
    assert found
    return math.nan if any(math.isnan(value) for value in found) else max(found)


def assert_complete(cell: Cell, data: BatchedDataDict, results: Results) -> None:
    """Every row was read by one replica, alike on all its ranks, and training moved the weights."""
    by_replica: dict[int, Mapping[str, Any]] = {}
    for seen in results:
        first = by_replica.setdefault(seen["coords"].dp, seen)
        for name in ("row", "before", "after", "reference", "entropy", "values", "indices"):
            assert torch.equal(seen[name], first[name]), (cell.name, name)
        metrics = [step["microbatch_metrics"] for step in seen["steps"]]
        assert metrics == [step["microbatch_metrics"] for step in first["steps"]], cell.name
        assert seen["unchanged"], "the policy's weights changed while the reference was active"
    read = torch.cat([seen["row"] for seen in by_replica.values()])
    assert sorted(read.tolist()) == sorted(data["row"].tolist()), cell.name


def _replicas(results: Results) -> list[Mapping[str, Any]]:
    return list({seen["coords"].dp: seen for seen in results}.values())


def _losses(truth: Truth, results: Results) -> Iterator[float]:
    for seen in results:
        for step, loss in zip(seen["steps"], truth.losses, strict=True):
            yield relative(step["loss"].item(), loss)
        evaluated = seen["evaluated"]["loss"].tolist()
        for value, loss in zip(evaluated, truth.evaluated, strict=True):
            yield relative(value, loss)


def _metrics(cell: Cell, data: BatchedDataDict, truth: Truth, results: Results) -> Iterator[float]:
    """Of the loss's own, added up, and of the counts that every microbatch is told."""
    for index, expected in enumerate(truth.metrics):
        valid = counts(data.get_batch(index, cell.rows))
        lists = [seen["steps"][index]["microbatch_metrics"] for seen in _replicas(results)]
        for name, value in expected.items():
            # A replica whose microbatches all are without rows reports nothing.
            found = reduced(name, [entry for each in lists for entry in each.get(name, [])])
            yield abs(found - float(value)) / max(1.0, abs(float(value)))
        for name, value in zip(("global_valid_seqs", "global_valid_toks"), valid, strict=True):
            yield from (abs(e - float(value)) for each in lists for e in each.get(name, []))


def reduced(name: str, values: Sequence[float]) -> float:
    """A metric of a global batch from its microbatches': extrema are not sums."""
    if "_min" in name:
        return min(values)
    return max(values) if "_max" in name else math.fsum(values)


def _weights(cell: Cell, path: Path, truth: Truth, results: Results) -> Iterator[float]:
    """Of every rank's shards; AssertionError unless all ranks together have every expert, each rank
    just its own. Under FSDP every rank has seen all of them whole.
    """
    if cell.fsdp:
        for seen in results:
            assert seen["weights"].keys() == truth.weights.keys()
            for name, weight in seen["weights"].items():
                yield (weight - truth.weights[name]).abs().max().item()
        return
    table = open_model(path).table
    entries, seen_experts = {entry.megatron: entry for entry in table.entries}, set()
    for rank, seen in enumerate(results):
        experts = own_experts(cell, rank, table.architecture.moe)
        for name, weight in seen["weights"].items():
            entry = entries[name]
            split = (seen["coords"].tp, cell.of.tp)
            if entry.expert is not None:
                assert entry.expert in experts, (rank, name)
                split = (rank % cell.of.etp, cell.of.etp)
                seen_experts.add(name)
            shard = torch.empty(
                entry.row.local_shape(table.architecture, split[1]), dtype=torch.float64
            )
            fill_shard(
                entry.row, table.architecture, shard, [truth.weights[n] for n in entry.hf], *split
            )
            assert weight.shape == shard.shape, name
            yield (weight - shard).abs().max().item()
    assert seen_experts == {name for name, entry in entries.items() if entry.expert is not None}


def own_experts(cell: Cell, rank: int, moe: Moe | None) -> range:
    """Those of each layer that a rank has: experts' tensor-parallel ranks are neighbours, and
    expert-parallel ranks follow each other, each with its share.
    """
    if moe is None:
        return range(0)
    share = moe.experts // cell.of.ep
    number = rank // cell.of.etp % cell.of.ep
    return range(number * share, (number + 1) * share)


def _read(results: Results, name: str, expected_BS: torch.Tensor) -> float:
    """Of whole rows: also position 0 and what lies beyond the end are compared, which are 0."""
    return _worst(
        (value_S - expected_BS[row]).abs().max().item()
        for seen in results
        for row, value_S in zip(seen["row"].tolist(), seen[name], strict=True)
    )


def _candidates(
    truth: Reading, data: BatchedDataDict, tolerance: float, results: Results
) -> Iterator[float]:
    """The largest logits of every token; infinite where they are other entries than the oracle's,
    unless neighbours are closer than twice the tolerance.
    """
    best_BSK = truth.logits_BSV.topk(CANDIDATES + 1, dim=-1)
    gaps_BSK = best_BSK.values[..., :-1] - best_BSK.values[..., 1:]
    apart_BSK = gaps_BSK > 2 * tolerance
    apart_BSK[..., 1:] &= apart_BSK[..., :-1].clone()
    for seen in results:
        for index, row in enumerate(seen["row"].tolist()):
            length = int(data["input_lengths"][row])
            values_LK, names_LK = seen["values"][index, :length], seen["indices"][index, :length]
            apart_LK = apart_BSK[row, :length]
            assert apart_LK.float().mean() > 0.9
            expected_LK = best_BSK.indices[row, :length, :-1]
            if not torch.equal(names_LK[apart_LK], expected_LK[apart_LK]):
                yield math.inf
            yield (values_LK - best_BSK.values[row, :length, :-1]).abs().max().item()
