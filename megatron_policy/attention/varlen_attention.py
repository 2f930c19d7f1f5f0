"""Causal attention of all sequences of a microbatch in one kernel call, where `device` has such a
kernel.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim
(can differ for values).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from megatron_policy.attention.tile_attention import cut
from megatron_policy.device import to_device, varlen_kernel
from megatron_policy.packing.multiples import round_up
from megatron_policy.packing.tokens import AttentionPiece

# What torch's flash attention takes: 16 bits, and head sizes that are multiples of 8, at most 256.
_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256


@dataclass(frozen=True)
class VarlenSequences:
    """Causal rectangles as a kernel takes them: those of the first row, then those of the next.

    `query_ends` and `key_ends` are int32 `[rectangles of all rows + 1]`, on the device, and begin
    with 0. `key_ranges` are the (start, length) of keys that, one after another, are those of a
    row's rectangles; they can overlap.
    """

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int
    key_ranges: tuple[tuple[int, int], ...]


def varlen_sequences(pieces: Iterable[AttentionPiece], rows: int) -> VarlenSequences | None:
    """These pieces of each of `rows` rows; their queries are all of the rank's, in order. None
    where there is no kernel.
    """
    if varlen_kernel() is None:
        return None
    pieces = [piece for piece in pieces if piece.queries]
    queries, keys = [piece.queries for piece in pieces], [piece.keys for piece in pieces]
    ranges: list[tuple[int, int]] = []  # those that continue one another are one
    for start, length in ((piece.key, piece.keys) for piece in pieces):
        if ranges and sum(ranges[-1]) == start:
            start, length = ranges[-1][0], ranges.pop()[1] + length
        ranges.append((start, length))
    return VarlenSequences(
        ends(queries * rows),
        ends(keys * rows),
        max(queries),
        max(keys),
        tuple(ranges),
    )


def varlen_rows(query_SBNH: torch.Tensor, key_KBGH: torch.Tensor) -> VarlenSequences | None:
    """As `varlen_sequences`, each row one sequence whose last queries are given. Copies nothing
    from the host.
    """
    if varlen_kernel() is None:
        return None
    (queries, rows), keys = query_SBNH.shape[:2], key_KBGH.size(0)
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=query_SBNH.device)
    return VarlenSequences(numbers * queries, numbers * keys, queries, keys, ((0, keys),))


def ends(lengths: Sequence[int]) -> torch.Tensor:
    """0 and the sum of the lengths up to each of them, int32 `[lengths + 1]`, on the device."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def supports(query_SBNH: torch.Tensor, value_KBGH: torch.Tensor) -> bool:
    """Whether the kernel supports this dtype and these head sizes."""
    largest = max(query_SBNH.size(-1), value_KBGH.size(-1))
    return query_SBNH.dtype in _DTYPES and largest <= _LARGEST_HEAD


def varlen_attention(
    query_SBNH: torch.Tensor,
    key_KBGH: torch.Tensor,
    value_KBGH: torch.Tensor,
    sequences: VarlenSequences,
    scale: float,
    reach: int | None,
) -> torch.Tensor:
    """Context `[S, B, N, H]`; `reach` is that of a sliding window, in positions before a query's
    own. Holds no scores, and under context parallelism a copy of the keys of all rectangles.
    """
    kernel = varlen_kernel()
    assert kernel is not None, "sequences are made only where there is a kernel"
    rows, width = query_SBNH.size(1), value_KBGH.size(-1)
    size = round_up(max(query_SBNH.size(-1), width), _HEAD_MULTIPLE)
    parts = [(query_SBNH,), *(cut(x, sequences.key_ranges) for x in (key_KBGH, value_KBGH))]
    states = (own[0] if len(own) == 1 else torch.cat(own) for own in parts)
    # With heads of one size: zeros change no product.
    padded = (F.pad(x, (0, size - x.size(-1))) if x.size(-1) < size else x for x in states)
    query_TNH, key_UGH, value_UGH = (x.transpose(0, 1).flatten(0, 1) for x in padded)
    context_TNH: torch.Tensor = kernel(
        query_TNH,
        key_UGH,
        value_UGH,
        sequences.query_ends,
        sequences.key_ends,
        sequences.most_queries,
        sequences.most_keys,
        scale=scale,
        window_size=(-1 if reach is None else reach, 0),
    )
    context_BSNH: torch.Tensor = context_TNH[..., :width].unflatten(0, (rows, -1))
    return context_BSNH.transpose(0, 1)
