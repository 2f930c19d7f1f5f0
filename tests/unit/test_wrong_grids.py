"""Families that see: grids and sizes of other pictures than a row's, other numbers of channels, and
videos of which a part is missing, are refused by name before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import (
    Medium,
    PatchMedium,
    PictureMedium,
    Shell,
    TileMedium,
)
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import BatchError
from megatron_policy.training.checks import check_batch
from tests.picture_models import (
    MEDIA,
    OMNI_SEES_VIDEOS,
    STILL,
    TINY,
    VOCAB,
    list_tokens,
    make_rows,
)

FILMED = "pixel_values_videos"
SEE_VIDEOS = [
    family
    for family in sorted(TINY)
    if FILMED in STILL.get(family, MEDIA) and (OMNI_SEES_VIDEOS or family != "nemotron_h_omni")
]
ONE, TWO, OTHER = 1, 4, 6
"""Rows with a picture, with two that differ, and with one of another size."""
COUNTED = "tokens 12[01], 0 of them drawn .* make"
Wrong = Iterator[tuple[int, dict[str, Any], str]]
"""A row, what it has in the place of its own values by key, and what is said of it."""


def make_shell(family: str, path: Path) -> Shell:
    AutoConfig.for_model(family, **TINY[family], **list_tokens(family)).save_pretrained(path)
    found = bind(read_config(path)).architecture.shell
    assert found is not None
    return found


def refuse(rows: BatchedDataDict, shell: Shell, wrong: Wrong) -> None:
    check_batch(rows, VOCAB, shell.attachments, shell)
    for row, own, said in wrong:
        taken = dict(rows)
        for key, value in own.items():
            column = [value if at == row else each for at, each in enumerate(rows[key])]
            taken[key] = torch.stack(column) if isinstance(rows[key], torch.Tensor) else column
        with pytest.raises(BatchError, match=said):
            check_batch(BatchedDataDict(taken), VOCAB, shell.attachments, shell)


def change_patches(medium: PatchMedium, rows: BatchedDataDict) -> Wrong:
    pixels, grids = medium.values, medium.grids
    one, two = rows[grids][ONE], rows[grids][TWO]
    yield ONE, {key: rows[key][OTHER] for key in medium.keys}, f"row 1 has 6 {COUNTED} 8"
    yield ONE, {pixels: rows[pixels][ONE][1:]}, f"23 patches in row 1, but {grids!r} count 24"
    wider = one + torch.eye(one.size(1), dtype=torch.long)[-1:] * medium.side
    yield ONE, {grids: wider}, f"{pixels!r} has 24 patches in row 1, but {grids!r} count 32"
    yield TWO, {grids: two[:1]}, f"{pixels!r} has 40 patches in row 4, but {grids!r} count 16"
    groups = rf"row 4 has .* groups of \[4, 6\], but its {grids!r} make groups of \[6, 4\]"
    yield TWO, {grids: two.flip(0)}, groups
    if not medium.flat:
        timed = torch.tensor([[2, 2, 6]])
        yield ONE, {grids: timed}, rf"{grids!r} has \[\[2, 2, 6\]\] in row 1: .* one frame"


def change_tiles(medium: TileMedium, rows: BatchedDataDict) -> Wrong:
    pixels, sizes = medium.values, medium.sizes
    two = rows[sizes][TWO]
    behind = f"{pixels!r} has more than zeros behind the 3 tiles that {sizes!r} makes of picture 0 "
    yield ONE, {sizes: torch.tensor([[8, 16]])}, f"{behind}of row 1"
    large = f"{pixels!r} has 5 tiles of each picture in row 5, but of the sizes .* one has 7"
    yield 5, {sizes: torch.tensor([[16, 24]])}, large
    yield TWO, {sizes: two[:1]}, f"{sizes!r} has sizes .* in row 4: .* each of the 2 pictures"
    if medium.counts is None:
        groups = rf"row 4 has .* groups of \[24, 16\], but its {sizes!r} make groups of \[16, 24\]"
        yield TWO, {sizes: two.flip(0)}, groups
    else:  # two that were given together are seen as wholes, of whatever size
        yield ONE, {medium.counts: torch.tensor([2])}, rf"{medium.counts!r} has \[2\] in row 1"
        few = f"{pixels!r} has 1 tiles of each picture in row 4, but of the sizes"
        yield TWO, {medium.counts: torch.tensor([1, 1])}, few


def change_whole(medium: PictureMedium, rows: BatchedDataDict) -> Wrong:
    pixels, sizes = medium.values, medium.sizes
    if sizes is None:
        yield TWO, {pixels: rows[pixels][TWO][1:]}, f"row 4 has .* {COUNTED}"
        cropped = rows[pixels][ONE][..., :-1]
        yield ONE, {pixels: cropped}, f"{pixels!r} has shape .* in row 1: pass whole pictures"
        return
    one, two = rows[sizes][ONE], rows[sizes][TWO]
    yield ONE, {key: rows[key][OTHER] for key in medium.keys}, f"row 1 has 6 {COUNTED} 8"
    behind = f"{pixels!r} has more than zeros behind the . x 8 pixels .* {sizes!r} says of picture"
    yield ONE, {sizes: one - 4}, f"{behind} 0 of row 1"
    yield TWO, {sizes: two.flip(0)}, f"{behind} 1 of row 4"
    for wrong in (one + 4, one.flip(1), one - 1):
        yield ONE, {sizes: wrong}, f"{sizes!r} has sizes .* in row 1: .* multiples of 4 up to"
    yield TWO, {sizes: two[:1]}, f"{sizes!r} has sizes .* in row 4: .* each of the 2 pictures"


def change_videos(medium: Medium, rows: BatchedDataDict) -> Wrong:
    pixels, grids = medium.values, medium.keys[-1]
    for row in (each for each, own in enumerate(rows[pixels]) if own is not None):
        values, ids_S = rows[pixels][row], rows["input_ids"][row]
        counted = f"row {row} has .* {COUNTED}"
        last = int((ids_S == medium.placeholder).nonzero()[-1])
        replaced = ids_S.where(torch.arange(len(ids_S)) != last, 5)
        yield row, {"input_ids": replaced}, counted
        cut = f"{counted} .* do not cut a row within a picture"
        yield row, {"input_lengths": torch.tensor(last)}, cut
        yield row, {key: None for key in medium.keys if key in rows}, counted
        if not isinstance(medium, PatchMedium):
            yield row, {pixels: values[:, 1:]}, counted
            continue
        grid = rows[grids][row]
        frames = int(grid[0, 0])
        fewer = grid - torch.tensor([[1, 0, 0]])
        left = values[len(values) // frames :]
        named = rf"{pixels!r} has \d+ patches in row {row}, but {grids!r} count \d+"
        for wrong in ({pixels: left}, {grids: fewer}, {grids: grid.repeat(2, 1)}):
            yield row, wrong, named
        yield row, {pixels: left, grids: fewer}, counted


def change_channels(medium: Medium, rows: BatchedDataDict) -> Wrong:
    """Also in all rows, which joining them would not show."""
    pixels = medium.values
    for row in (each for each, own in enumerate(rows[pixels]) if own is not None):
        values = rows[pixels][row]
        at = max(1, values.ndim - 3)  # of patches in one dimension: their values
        grey = values.narrow(at, 0, 1)
        for wrong in (grey, torch.cat([values, grey], at), values.flatten(1)[:, :, None]):
            yield row, {pixels: wrong}, rf"{pixels!r} has shape .* in row {row}: pass"
        yield row, {pixels: values[:0]}, f"{pixels!r} is empty in row {row}: pass None"


@pytest.mark.parametrize("family", sorted(TINY))
def test_other_channels_than_the_tower_reads_are_refused(tmp_path: Path, family: str) -> None:
    shell, rows = make_shell(family, tmp_path), make_rows(family)
    seen = [each for each in shell.media if each.values in (shell.pictures.values, FILMED)]
    for medium in (each for each in seen if each.values in rows):
        refuse(rows, shell, change_channels(medium, rows))
        at = max(1, next(each for each in rows[medium.values] if each is not None).ndim - 3)
        grey = [None if each is None else each.narrow(at, 0, 1) for each in rows[medium.values]]
        with pytest.raises(BatchError, match=rf"{medium.values!r} has shape .* in row [13]: pass"):
            check_batch(rows | {medium.values: grey}, VOCAB, shell.attachments, shell)


@pytest.mark.parametrize("family", sorted(TINY))
def test_grids_and_sizes_of_other_pictures_are_refused(tmp_path: Path, family: str) -> None:
    shell, rows = make_shell(family, tmp_path), make_rows(family)
    medium = shell.pictures
    if isinstance(medium, PatchMedium):
        wrong = change_patches(medium, rows)
    elif isinstance(medium, TileMedium):
        wrong = change_tiles(medium, rows)
    else:
        assert isinstance(medium, PictureMedium)
        wrong = change_whole(medium, rows)
    refuse(rows, shell, wrong)


@pytest.mark.parametrize("family", SEE_VIDEOS)
def test_videos_of_which_a_part_is_missing_are_refused(tmp_path: Path, family: str) -> None:
    shell, rows = make_shell(family, tmp_path), make_rows(family)
    (medium,) = (each for each in shell.media if each.values == FILMED)
    refuse(rows, shell, change_videos(medium, rows))
