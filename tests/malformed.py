"""Batches as they come by mistake: under each key a value that does not fit it, or another kind of
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_policy.batch import BatchedDataDict

KEYS = ("input_ids", "input_lengths", "sample_mask", "token_mask", "extra")
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
)


def values(rows: int, length: int) -> dict[str, Any]:
    """What may stand under any key."""
    flat, wide = torch.ones(rows), torch.ones(rows, length)
    shapes = {
        "no dimension": (),
        "no rows": (0,),
        "few rows": (rows - 1,),
        "many rows": (rows + 1,),
        "one entry": (1,),
        "no positions": (rows, 0),
        "one position": (rows, 1),
        "few positions": (rows, length - 1),
        "many positions": (rows, length + 1),
        "transposed": (length, rows),
        "a third dimension": (rows, length, 2),
        "few rows of positions": (rows - 1, length),
    }
    ones: dict[str, Any] = {f"ones, {name}": torch.ones(shape) for name, shape in shapes.items()}
    ones |= {f"whole, {name}": torch.ones(shape).long() for name, shape in shapes.items()}
    return (
        ones
        | {
            "None": None,
            "a number": 3,
            "a float": 2.5,
            "a word": "word",
            "as many letters": "x" * rows,
            "bytes": bytes(rows),
            "an empty list": [],
            "a short list": [1] * (rows - 1),
            "a list of numbers": [1] * rows,
            "a list of None": [None] * rows,
            "a list of lists": [[1] * length] * rows,
            "a tuple": (1,) * rows,
            "a dict": dict.fromkeys(range(rows), 1),
            "a set": set(range(rows)),
            "an iterator": iter([1] * rows),
            "a class": int,
            "an array": np.ones((rows, length)),
            "an array of integers": np.ones(rows, dtype=np.int64),
            "sparse rows": flat.to_sparse(),
            "sparse": wide.to_sparse(),
            "compressed": wide.long().to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(2)] * rows),
            "quantized": torch.quantize_per_tensor(wide, 0.1, 0, torch.qint8),
            "without values": torch.ones(rows, length, device="meta"),
            "whole, without values": torch.ones(rows, length, device="meta").long(),
            "rows without values": torch.ones(rows, device="meta"),
            "no number": torch.full((rows,), torch.nan),
            "no numbers": torch.full((rows, length), torch.nan),
            "infinite": torch.full((rows,), torch.inf),
            "negative": -flat,
            "negative and whole": -flat.long(),
            "negative positions": -wide,
            "too large for fp32": torch.full((rows,), 1e300, dtype=torch.float64),
            "too large together": torch.full((rows,), 3e38),
            "too large positions": torch.full((rows, length), 3e38),
            "the largest integers": torch.full((rows, length), 2**63 - 1),
            "the largest integer": torch.full((rows,), 2**63 - 1),
            "the largest unsigned": torch.full((rows, length), 2**64 - 1, dtype=torch.uint64),
            "zeros": torch.zeros(rows),
            "zeros that are whole": torch.zeros(rows).long(),
            "one row for all": torch.ones(1, length).expand(rows, length),
            "the result of a graph": torch.ones(rows, requires_grad=True) * 2,
            "a view": torch.ones(rows, 2 * length)[:, ::2],
        }
        | {
            f"{str(dtype).removeprefix('torch.')}{kind}": value.to(dtype)
            for dtype in DTYPES
            for kind, value in (("", flat), (" positions", wide))
        }
    )


def malformed(good: Callable[[], BatchedDataDict]) -> Iterator[tuple[str, Any]]:
    """Name and batch: many cannot be computed with, others are unusual only."""
    rows, length = good()["input_ids"].shape
    yield from (("None", None), ("a list", [1]), ("a word", "input_ids"), ("empty", {}))
    yield "a tensor", good()["input_ids"]
    yield "a dict", dict(good())
    yield "a number as a key", BatchedDataDict(dict(good()) | {7: torch.ones(rows)})
    for key in KEYS:
        missing = dict(good())
        missing.pop(key, None)
        yield f"without {key}", BatchedDataDict(missing)
        for name, value in values(rows, length).items():
            yield f"{key}: {name}", BatchedDataDict(dict(good()) | {key: value})
