"""Deals a batch to data-parallel ranks and joins their answers; knows neither Ray nor models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import ConfigError


def training_shards(
    data: BatchedDataDict, ranks: int, global_batch_size: int, micro_batch_size: int
) -> list[BatchedDataDict]:
    """Each rank's part of every global batch, one after another; ConfigError unless everything
    divides.
    """
    share, left = divmod(global_batch_size, ranks)
    if left or share % micro_batch_size:
        raise ConfigError(
            f"gbs={global_batch_size} cannot be dealt to {ranks} data-parallel ranks in "
            f"microbatches of mbs={micro_batch_size}: make gbs a multiple of "
            f"{ranks * micro_batch_size}."
        )
    if data.size == 0 or data.size % global_batch_size:
        raise ConfigError(
            f"the data have {data.size} samples, which is no multiple of gbs={global_batch_size}: "
            "drop or pad the rest (padding rows have sample_mask 0), or pass another gbs."
        )
    return [_compact(shard) for shard in data.shard_by_batch_size(ranks, global_batch_size)]


def even_shards(data: BatchedDataDict, ranks: int) -> list[BatchedDataDict]:
    """Contiguous parts of equal size in order; the last row fills up where rows do not divide."""
    if data.size == 0:
        raise ConfigError("the data have no rows; pass at least one.")
    missing = -data.size % ranks
    if missing:
        data = data.select_indices([*range(data.size), *[data.size - 1] * missing])
    return [_compact(shard) for shard in data.shard_by_batch_size(ranks)]


def joined(
    parts: Sequence[Mapping[str, Any]], rows: int, pad: Mapping[str, float] | None = None
) -> BatchedDataDict:
    """The ranks' answers in the caller's order, cut to the caller's `rows`.

    Where lengths differ in dimension 1 they are filled up with 0, or with `pad[key]`.
    """
    return BatchedDataDict.from_batches(parts, pad).slice(0, rows)


def merged_training(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `train` returns to the driver: `loss` [global batches] and `grad_norm` [1], which every
    rank has in full, and `all_mb_metrics` with every data-parallel rank's microbatches one after
    another."""
    metrics: dict[str, list[Any]] = {}
    for result in results:
        for name, values in result["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    return {
        "loss": results[0]["global_loss"],
        "grad_norm": results[0]["grad_norm"],
        "all_mb_metrics": metrics,
    }


def _compact(shard: BatchedDataDict) -> BatchedDataDict:
    """The shard without the rest of the batch: a pickled view carries all it is a view of."""
    return BatchedDataDict(
        {
            key: value.clone() if isinstance(value, torch.Tensor) and _is_view(value) else value
            for key, value in shard.items()
        }
    )


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
