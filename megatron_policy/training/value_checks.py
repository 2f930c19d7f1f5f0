"""Checks of single values of a batch, independent of its other keys, and the temperatures of its
rows.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from numbers import Real
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.numbers import COLDEST, HOTTEST
from megatron_policy.converters.architecture import (
    AnyMedium,
    FrameMedium,
    PatchMedium,
    PictureMedium,
    Shell,
    TileMedium,
    pick_row,
)
from megatron_policy.converters.architecture.media import OfRow
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import PATCHES, TEMPERATURE, inside

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


def holds_integers(dtype: torch.dtype) -> bool:
    """Whether this is an integer dtype (bool is not)."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


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
    raise BatchError(
        f"{key!r} is a {type(value).__name__} without rows; every value must be a tensor or a list "
        "with one entry per row"
    )


def take_attachments(batch: BatchedDataDict, keys: Collection[str]) -> None:
    """Make what is under each of `keys` a list with a tensor, or None, for each row, without the
    rest of a larger tensor of which it is a part. BatchError for other entries.
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
        if key in batch:
            batch[key] = _change_rows(rows, take)


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


def check_pictures(batch: BatchedDataDict, shell: Shell) -> None:
    """BatchError, naming the row, unless what each row of a checked `batch` has for the model's
    towers fits the grids beside it, and these its placeholders. What the policy has drawn is text,
    placeholders too: by `token_mask` or, without it, all behind those that the grids count. Adds
    the number of patches of each row.
    """
    tokens_BS = batch["input_ids"]
    text_BS = inside(batch)
    drawn_BS = batch["token_mask"] != 0 if "token_mask" in batch else text_BS
    patches_B = torch.zeros(len(tokens_BS), dtype=torch.long)
    for medium in shell.media:
        at_BS = (tokens_BS == medium.placeholder) & text_BS
        for row in range(len(tokens_BS)):
            given = pick_row(medium, batch, row)
            _check_media(medium, row, given)
            patches_B[row] += medium.count_patches(given)
            others = (pick_row(each, batch, row)[each.values] for each in shell.list_rivals(medium))
            if any(other is not None for other in others):
                if given[medium.values] is None:
                    continue  # the other's count
                raise BatchError(
                    f"row {row} has pictures and videos, whose placeholders are the same tokens "
                    f"{medium.placeholder}: give those of one kind to a row"
                )
            wanted, found = medium.count_tokens(given), int(at_BS[row].sum())
            if not found - int((at_BS[row] & drawn_BS[row]).sum()) <= wanted <= found:
                raise BatchError(
                    f"row {row} has {found} tokens {medium.placeholder}, whose place features of "
                    f"{medium.values!r} take, but its {medium.keys[-1]!r} make {wanted}: expand "
                    "placeholders as the model's processor does, pass what belongs to them, and do "
                    "not cut a row within a picture"
                )
    batch[PATCHES] = patches_B
    _check_groups(batch, shell)


def _check_groups(batch: BatchedDataDict, shell: Shell) -> None:
    types_BS = shell.find_types(batch, inside(batch))
    for number, medium in enumerate(shell.media, start=1):
        if not isinstance(medium, PatchMedium):
            continue
        for row, types_S in enumerate(types_BS):
            wanted = medium.list_groups(pick_row(medium, batch, row))
            runs = [len([*run]) for is_one, run in groupby((types_S == number).tolist()) if is_one]
            if runs != wanted:
                raise BatchError(
                    f"row {row} has tokens {medium.placeholder} in groups of {runs}, but its "
                    f"{medium.grids!r} make groups of {wanted}: keep the order of pictures, and "
                    "the tokens that the model's processor puts between them and between frames "
                    "of videos"
                )


def _check_media(medium: AnyMedium, row: int, given: OfRow) -> None:
    missing = [key for key, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        has = next(key for key in given if key not in missing)
        raise BatchError(
            f"row {row} has {has!r} without {missing[0]!r}: pass both, or None for both"
        )
    values, *sizes = given.values()
    assert values is not None
    if not values.is_floating_point():
        raise BatchError(
            f"{medium.values!r} is {values.dtype} in row {row}: pass the floating-point numbers "
            "that the model's processor makes of pixels"
        )
    if isinstance(medium, PatchMedium):
        _check_grids(medium, row, values, *sizes)
    elif isinstance(medium, FrameMedium):
        _check_frames(medium, row, values)
    elif isinstance(medium, TileMedium):
        _check_tiles(medium, row, given)
    else:
        _check_sizes(medium, row, values, *sizes)


def _check_grids(medium: PatchMedium, row: int, values: Any, grids: Any) -> None:
    side = medium.side
    legal = grids.ndim == 2 and grids.size(1) == 3 and holds_integers(grids.dtype) and len(grids)
    if not legal or (grids < 1).any() or (grids[:, 1:] % side).any():
        raise BatchError(
            f"{medium.grids!r} has {grids.tolist()} in row {row}: pass integers [pictures, 3], the "
            f"patches in time, height and width, of which the last two are multiples of {side}"
        )
    patch = values.shape[1:]
    if patch != (medium.patch or patch) or (medium.patch is None and len(patch) != 1):
        wanted = ", ".join(map(str, medium.patch or ("values",)))
        raise BatchError(
            f"{medium.values!r} has shape {tuple(values.shape)} in row {row}; it must be "
            f"[patches, {wanted}], as the model's processor makes it"
        )
    if medium.still and (grids[:, 0] > 1).any():
        raise BatchError(
            f"{medium.grids!r} has {grids.tolist()} in row {row}: the model reads pictures, which "
            "have one frame"
        )
    patches = int(grids.prod(-1).sum())
    if len(values) != patches:
        raise BatchError(
            f"{medium.values!r} has {len(values)} patches in row {row}, but {medium.grids!r} count "
            f"{patches}"
        )


def _check_sizes(medium: PictureMedium, row: int, values: Any, sizes: Any = None) -> None:
    most, step = values.shape[2:], medium.patch * medium.side
    if values.ndim != 4 or not len(values) or medium.fixed not in (None, tuple(most)):
        shape = ", ".join(map(str, medium.fixed or ("height", "width")))
        raise BatchError(
            f"{medium.values!r} has shape {[*values.shape]} in row {row}: pass whole pictures, "
            f"[pictures, channels, {shape}]"
        )
    if medium.by_row and (blank := [n for n, each in enumerate(values) if not each.any()]):
        raise BatchError(
            f"{medium.values!r} has nothing but zeros in picture {blank[0]} of row {row}: the "
            "model's class leaves such pictures out. Leave out those that fill a row up"
        )
    if medium.fixed is not None:
        return
    if sizes is None:
        sizes = torch.tensor(most).expand(len(values), 2)
    legal = sizes.shape == (len(values), 2) and holds_integers(sizes.dtype)
    if not legal or (sizes < 1).any() or (sizes % step).any() or (sizes > torch.tensor(most)).any():
        raise BatchError(
            f"{medium.sizes or medium.values!r} has sizes {sizes.tolist()} in row {row}: pass the "
            f"pixels of each of the {len(values)} pictures in height and width, multiples of "
            f"{step} up to {[*most]}"
        )


def _check_frames(medium: FrameMedium, row: int, values: Any) -> None:
    legal = values.ndim == 5 and values.shape[3:] == (medium.tile, medium.tile)
    if not legal or not values.numel():
        raise BatchError(
            f"{medium.values!r} has shape {[*values.shape]} in row {row}: pass the frames of each "
            f"video, [videos, frames, channels, {medium.tile}, {medium.tile}]"
        )


def _check_tiles(medium: TileMedium, row: int, given: Mapping[str, Any]) -> None:
    values, sizes = given[medium.values], given[medium.sizes]
    if values.ndim != 5 or not len(values) or values.shape[3:] != (medium.tile, medium.tile):
        raise BatchError(
            f"{medium.values!r} has shape {[*values.shape]} in row {row}: pass the tiles of each "
            f"picture, [pictures, tiles, channels, {medium.tile}, {medium.tile}]"
        )
    legal = sizes.shape == (len(values), 2) and holds_integers(sizes.dtype)
    if not legal or (sizes < 1).any():
        raise BatchError(
            f"{medium.sizes!r} has sizes {sizes.tolist()} in row {row}: pass the pixels in height "
            f"and width that each of the {len(values)} pictures had before it was cut into tiles"
        )
    if medium.counts is not None:
        counts = given[medium.counts]
        legal = counts.ndim == 1 and holds_integers(counts.dtype) and not (counts < 1).any()
        if not legal or int(counts.sum()) != len(values):
            raise BatchError(
                f"{medium.counts!r} has {counts.tolist()} in row {row}, which has {len(values)} "
                f"pictures: pass how many were given together, [{len(values)}]"
            )
    if (most := max(medium.list_tiles(given))) > values.size(1):
        raise BatchError(
            f"{medium.values!r} has {values.size(1)} tiles of each picture in row {row}, but of "
            f"the sizes {sizes.tolist()} one has {most}: pass all that the model's processor makes"
        )


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
