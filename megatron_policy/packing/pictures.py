"""Where pictures are among the tokens of rows.

Shapes: S positions.
"""

from __future__ import annotations

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Shell
from megatron_policy.packing.microbatch import inside
from megatron_policy.packing.tokens import Blocks


def find_blocks(shell: Shell | None, data: BatchedDataDict) -> Blocks:
    """The runs of tokens of each row, in host memory, that see each other in both directions: those
    of a picture, where the model's do; none at all if no row has one.
    """
    if shell is None or not shell.both_ways:
        return ()
    found = []
    for types_S in shell.find_types(data, inside(data)):
        types, counts = torch.unique_consecutive(types_S, return_counts=True)
        stops = counts.cumsum(0).tolist()
        runs = zip(types.tolist(), counts.tolist(), stops, strict=True)
        found.append([range(stop - count, stop) for kind, count, stop in runs if kind])
    return found if any(found) else ()
