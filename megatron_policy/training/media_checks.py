"""Checks of what rows carry for the towers of a model that sees pictures or hears sound."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import (
    AnyMedium,
    FrameMedium,
    PatchMedium,
    PictureMedium,
    Shell,
    SoundMedium,
    TileMedium,
    pick_row,
)
from megatron_policy.converters.architecture.media import OfRow
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import PATCHES, inside
from megatron_policy.training.value_checks import holds_integers


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
                    f"{medium.values!r} take, but its {medium.keys[-1]!r} make {wanted}: "
                    "expand placeholders as the model's processor does, pass what belongs to them, "
                    "and do not cut a row within a picture or a clip of sound"
                )
    batch[PATCHES] = patches_B
    _check_groups(batch, shell)


def _check_groups(batch: BatchedDataDict, shell: Shell) -> None:
    text_BS = inside(batch)
    types_BS = shell.find_types(batch, text_BS)
    for number, medium in enumerate(shell.media, start=1):
        if not isinstance(medium, PatchMedium | SoundMedium):
            continue
        for row, types_S in enumerate(types_BS):
            wanted, taken_S = medium.list_groups(pick_row(medium, batch, row)), types_S == number
            runs = [len([*run]) for is_one, run in groupby(taken_S.tolist()) if is_one]
            if runs != wanted:
                raise BatchError(
                    f"row {row} has tokens {medium.placeholder} in groups of {runs}, but its "
                    f"{medium.keys[-1]!r} make groups of {wanted}: keep the order of pictures and "
                    "clips, and the tokens that the model's processor puts between them and "
                    "between frames of videos"
                )
            _check_marks(medium, row, batch["input_ids"][row, text_BS[row]], taken_S)


def _check_marks(
    medium: PatchMedium | SoundMedium, row: int, tokens_S: torch.Tensor, taken_S: torch.Tensor
) -> None:
    """BatchError unless each group of placeholders is behind the token that the model's class looks
    for, if it looks for one, and before another token.
    """
    if medium.start is None:
        return
    at = taken_S.nonzero().flatten().tolist()
    firsts = [each for each in at if each - 1 not in at]
    wrong = [each for each in firsts if each == 0 or tokens_S[each - 1] != medium.start]
    if wrong or len(tokens_S) - 1 in at:
        raise BatchError(
            f"row {row} has tokens {medium.placeholder} at position {(wrong or at[-1:])[0]} that "
            f"are not between token {medium.start} and another one: keep those that the model's "
            "processor puts around pictures and clips. Sound between the frames of its video "
            "(use_audio_in_video) is not read: pass it as a clip of its own"
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
            "that the model's processor makes of pixels and sound"
        )
    if isinstance(medium, PatchMedium):
        _check_grids(medium, row, values, sizes[-1], given.get(medium.seconds or ""))
    elif isinstance(medium, FrameMedium):
        _check_frames(medium, row, values)
    elif isinstance(medium, TileMedium):
        _check_tiles(medium, row, given)
    elif isinstance(medium, SoundMedium):
        _check_clips(medium, row, values, *sizes)
    else:
        _check_sizes(medium, row, values, *sizes)


def _check_clips(medium: SoundMedium, row: int, values: Any, mask: Any) -> None:
    if values.ndim != 3 or values.size(1) != medium.bins:
        raise BatchError(
            f"{medium.values!r} is of shape {[*values.shape]} in row {row}: pass [clips, "
            f"{medium.bins}, frames], as the model's processor makes it of sound"
        )
    whole = mask.dtype == torch.bool or holds_integers(mask.dtype)
    whole = whole and mask.shape == (values.size(0), values.size(2)) and mask.numel() > 0
    first = torch.arange(values.size(2)) < mask.long().sum(-1, keepdim=True)
    if not whole or not torch.equal(first.long(), mask.long()):
        raise BatchError(
            f"{medium.mask!r} is {mask.dtype} of shape {[*mask.shape]} in row {row}: pass 1 for "
            f"the first frames of each clip and 0 for what fills it up, {[*values.shape[::2]]}"
        )
    if 0 in (tokens := medium.list_groups({medium.mask: mask})):
        raise BatchError(
            f"clip {tokens.index(0)} of row {row} is too short for a token: leave it out, and its "
            "placeholder"
        )


def _check_grids(
    medium: PatchMedium, row: int, values: Any, grids: Any, seconds: Any = None
) -> None:
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
    if seconds is not None and (seconds.shape != (len(grids),) or not (seconds > 0).all()):
        raise BatchError(
            f"{medium.seconds!r} has {seconds.tolist()} in row {row}: pass a positive number of "
            f"seconds from patch to patch for each of {len(grids)} videos"
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
