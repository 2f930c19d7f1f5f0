"""The batches that travel: rows, and the attributes that say which rows make a microbatch."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch


class BatchedDataDict(UserDict):
    """A dict of tensors whose dimension 0 is the row, and of what knows how to be sliced by rows.

    Unlike ours it has the attributes of a plan only where there is one.
    """

    @property
    def size(self) -> int:
        return len(next(iter(self.data.values())))

    def rows(self, indices: list[int]) -> BatchedDataDict:
        return BatchedDataDict(
            {
                key: value.slice(indices) if hasattr(value, "slice") else value[indices]
                for key, value in self.data.items()
            }
        )

    @classmethod
    def joined(cls, parts: list[BatchedDataDict]) -> BatchedDataDict:
        return cls({key: torch.cat([part[key] for part in parts]) for key in parts[0]})


def sharded(data: BatchedDataDict, shards: int, gbs: int) -> list[BatchedDataDict]:
    """Each shard's rows of every global batch, one after another."""
    own = gbs // shards
    starts = range(0, data.size, gbs)
    return [
        data.rows([start + shard * own + i for start in starts for i in range(own)])
        for shard in range(shards)
    ]


def packed(shard: BatchedDataDict, own: int, tokens: int, multiple: int) -> BatchedDataDict:
    """`shard` with a plan for sequence packing: `own` rows a global batch, neighbours together as
    long as they are at most `tokens` when each is padded to a `multiple`.
    """
    indices: list[Any] = []
    lengths: list[Any] = []
    for start in range(0, shard.size, own):
        spans: list[list[int]] = []
        sums: list[int] = []
        for row in range(own):
            length = -(-int(shard["input_lengths"][start + row]) // multiple) * multiple
            if spans and sums[-1] + length <= tokens:
                spans[-1][1], sums[-1] = row + 1, sums[-1] + length
            else:
                spans.append([row, row + 1])
                sums.append(length)
        indices.append(spans)
        lengths.append(sums)
    shard.micro_batch_indices, shard.micro_batch_lengths = indices, lengths
    shard.elem_counts_per_gb = [own] * len(indices)
    return shard
