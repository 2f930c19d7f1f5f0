"""The temperatures of a batch's rows, in place of the policy's.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.numbers import COLDEST, HOTTEST
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import TEMPERATURE


def with_temperature(
    data: BatchedDataDict, temperature: float | torch.Tensor | None
) -> BatchedDataDict:
    """A copy of `data` whose rows have this temperature, one for all or one each, `[B]`, in place
    of any that they carry; `data` themselves for None.
    """
    if temperature is None or not isinstance(data, Mapping):
        return data  # what is no batch is refused where it is checked
    given = BatchedDataDict(data)
    tokens = given.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not tokens.ndim:
        return data
    if isinstance(temperature, Real):
        # In double precision the number is the one that a configuration would have.
        temperature = torch.full((tokens.size(0),), float(temperature), dtype=torch.float64)
    given[TEMPERATURE] = temperature
    return given


def check_temperature(data: BatchedDataDict) -> None:
    """BatchError naming the row unless the data carry no temperatures, or one for each row."""
    given = data.get(TEMPERATURE)
    if given is None:
        return
    rows = data["input_ids"].size(0)
    if not isinstance(given, torch.Tensor) or given.shape != (rows,):
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise BatchError(
            f"{TEMPERATURE!r} is {shape}: pass one number, or a tensor [{rows}] with one for each "
            "row"
        )
    if not given.is_floating_point():
        raise BatchError(f"{TEMPERATURE!r} is {given.dtype}: temperatures are floating point")
    odd = ~((given >= COLDEST) & (given <= HOTTEST))
    if odd.any():
        row = int(odd.nonzero()[0])
        raise BatchError(
            f"{TEMPERATURE!r} has {float(given[row]):g} in row {row}; temperatures of given tokens "
            f"lie between {COLDEST:g} and {HOTTEST:g}"
        )
