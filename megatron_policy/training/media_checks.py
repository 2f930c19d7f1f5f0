"""Checks of what rows carry for the towers of a model that sees pictures or hears sound."""

from __future__ import annotations

from itertools import accumulate, groupby

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Medium, Shell, pick_row
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import PATCHES, inside


def check_pictures(batch: BatchedDataDict, shell: Shell) -> None:
    """BatchError, naming the row, unless what each row of a checked `batch` has for the model's
    towers fits the grids beside it, and these its placeholders. What the policy has drawn, see
    `Shell.find_drawn`, is text, placeholders too. Adds the number of patches of each row.
    """
    tokens_BS, text_BS, drawn_BS = batch["input_ids"], inside(batch), shell.find_drawn(batch)
    patches_B = torch.zeros(len(tokens_BS), dtype=torch.long)
    for medium in shell.media:
        _check_optional(medium, batch)
        at_BS = (tokens_BS == medium.placeholder) & text_BS
        for row in range(len(tokens_BS)):
            given = pick_row(medium, batch, row)
            medium.check(row, given)
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
            drawn = int((at_BS[row] & drawn_BS[row]).sum())
            if not found - drawn <= wanted <= found:
                raise BatchError(
                    f"row {row} has {found} tokens {medium.placeholder}, {drawn} of them drawn by "
                    f"the policy, whose place features of {medium.values!r} take, but its "
                    f"{medium.keys[-1]!r} make {wanted}: expand placeholders as the model's "
                    "processor does, pass what belongs to all of them, and do not cut a row within "
                    "a picture or a clip of sound. Those that the policy has drawn are text where "
                    "mm_token_type_ids are 0 or, without these, token_mask counts them and neither "
                    "of the row's first two tokens"
                )
    batch[PATCHES] = patches_B
    _check_groups(batch, shell)


def _check_optional(medium: Medium, batch: BatchedDataDict) -> None:
    """BatchError unless all rows that have values of the medium, or none, have what is optional."""
    rows = [row for row, each in enumerate(batch.get(medium.values, ())) if each is not None]
    for key in medium.optional if rows else ():
        missing = [row for row in rows if pick_row(medium, batch, row)[key] is None]
        if 0 < len(missing) < len(rows):
            other = next(row for row in rows if row not in missing)
            raise BatchError(
                f"row {missing[0]} has {medium.values!r} without {key!r}, which row {other} has: "
                "pass it for all rows that have them, or for none"
            )


def _check_groups(batch: BatchedDataDict, shell: Shell) -> None:
    text_BS = inside(batch)
    types_BS = shell.find_types(batch, text_BS)
    for number, medium in enumerate(shell.media, start=1):
        for row, types_S in enumerate(types_BS):
            wanted, taken_S = medium.list_groups(pick_row(medium, batch, row)), types_S == number
            runs = [len([*run]) for is_one, run in groupby(taken_S.tolist()) if is_one]
            whole = medium.joined and {*accumulate(runs)} <= {*accumulate(wanted)}
            if runs != wanted and not whole:
                raise BatchError(
                    f"row {row} has tokens {medium.placeholder} in groups of {runs}, but its "
                    f"{medium.keys[-1]!r} make groups of {wanted}: keep the order of pictures and "
                    "clips, and the tokens that the model's processor puts between them and "
                    "between frames of videos"
                )
            _check_marks(medium, row, batch["input_ids"][row, text_BS[row]], taken_S)


def _check_marks(medium: Medium, row: int, tokens_S: torch.Tensor, taken_S: torch.Tensor) -> None:
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
