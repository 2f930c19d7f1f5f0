"""Checks of single values of a batch, independent of its other keys, and the temperatures of its
rows.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.numbers import COLDEST, HOTTEST
from megatron_policy.converters.architecture import Shell
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import TEMPERATURE

LARGEST_MASK = 2**24
"""Above any real weight; sums of any number of such masks are finite in fp32."""
_MASKS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_TRAVELS = (*_MASKS, torch.complex64, torch.complex128)
"""The dtypes torch can pickle."""


def check_kind(key: str, tensor: torch.Tensor) -> None:
    """BatchError for a tensor whose rows cannot be sliced, or that has no values."""
    kinds = {
        "sparse": tensor.layout != torch.strided,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "on the device 'meta', without values,": tensor.is_meta,
    }
    for kind, found in kinds.items():
        if found:
            raise BatchError(f"{key!r} is {kind}; pass an ordinary dense tensor")


def _check_travels(key: str, tensor: torch.Tensor) -> None:
    check_kind(key, tensor)
    if tensor.dtype not in _TRAVELS:
        raise BatchError(
            f"{key!r} is {tensor.dtype}, which cannot be sent from process to process: convert it "
            "to another dtype"
        )


def shape_of(key: str, value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of a list with one item per row; BatchError for anything else."""
    if isinstance(value, torch.Tensor) and value.ndim:
        _check_travels(key, value)
        return tuple(value.shape)
    if isinstance(value, list):
        for item in value:
            if isinstance(item, torch.Tensor):
                _check_travels(key, item)
        return (len(value),)
    kind = "number" if isinstance(value, torch.Tensor) else type(value).__name__
    raise BatchError(
        f"{key!r} is a {kind}: every value must be a tensor or a list, with one entry for each row"
    )


def take_attachments(batch: BatchedDataDict, keys: Collection[str]) -> None:
    """Make what is under each of `keys` a list with a tensor, or None, for each row, without the
    rest of a larger tensor of which it is a part. BatchError for other entries, and for numbers
    that are not finite.
    """

    def take(each: torch.Tensor) -> torch.Tensor:
        part = each.untyped_storage().nbytes() > each.nbytes
        return each.detach().clone() if part else each.detach()

    for key in keys:
        rows: list[Any] = list(batch.get(key, ()))
        for row, each in enumerate(rows):
            if each is not None and not isinstance(each, torch.Tensor):
                raise BatchError(
                    f"{key!r} has a {type(each).__name__} in row {row}: the model reads a tensor "
                    "there, or None in a row that has nothing"
                )
        first = {id(each): row for row, each in reversed([*enumerate(rows)])}
        for row in first.values():  # what several rows have is looked at once
            each = rows[row]
            if each is not None and (found := _find_odd(each)) is not None:
                raise BatchError(
                    f"{key!r} has {each[found]} in row {row} at {[*found]}: what a tower reads is "
                    "finite. Look for a division by 0 where it is made, or for a damaged file"
                )
        if key in batch:
            batch[key] = _change_rows(rows, take)


def _find_odd(values: torch.Tensor) -> tuple[int, ...] | None:
    """The place of the first number that is not finite; None without one. The extremes tell whether
    there is any.
    """
    if not values.numel() or not values.is_floating_point():
        return None
    if all(bool(each.isfinite()) for each in values.aminmax()):
        return None
    return tuple((~values.isfinite()).nonzero()[0].tolist())


def narrow_pixels(batch: BatchedDataDict, shell: Shell, dtype: torch.dtype) -> None:
    """Make what the towers read `dtype`, in which they compute, where that is narrower: they begin
    with it, so nothing changes but the bytes that travel.
    """
    for medium in shell.media:
        if medium.values in batch:
            batch[medium.values] = _change_rows(
                batch[medium.values],
                lambda each: each.to(dtype) if each.element_size() > dtype.itemsize else each,
            )


def _change_rows(
    rows: Sequence[torch.Tensor | None], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Each row's tensor changed; one that several rows have stays one, which travels once."""
    known = {id(each): None if each is None else change(each) for each in rows}
    return [known[id(each)] for each in rows]


def check_mask(key: str, mask: Any, shape: tuple[int, ...]) -> None:
    """BatchError naming the first entry that is not a valid mask value."""
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        has = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else "no tensor"
        each = "row" if len(shape) == 1 else "token"
        raise BatchError(
            f"{key!r} has {has}, which is wrong from row 0 on; it must be {list(shape)}, one "
            f"number for each {each}"
        )
    if mask.dtype not in _MASKS:
        raise BatchError(f"{key!r} is {mask.dtype}; masks are bool, float or a usual integer")
    odd = ~((mask >= 0) & (mask.double() <= LARGEST_MASK))  # also true for NaN
    if odd.any():
        where = odd.nonzero()[0].tolist()
        at = f"row {where[0]}" + (f" at position {where[1]}" if where[1:] else "")
        raise BatchError(
            f"{key!r} has {mask[tuple(where)]} in {at}; masks are 0, which masks out, or positive "
            f"and at most {LARGEST_MASK}, so that they can be added up"
        )


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
