"""Kinds of pictures and videos that towers see in tiles, or frames, of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError, ConversionError

from .media import Found, Make, Medium, OfRow, SeenMedium, Shape, Size

_EXCESS = 1.1
"""By which the sides of a grid can exceed those of the most features before they are shrunk."""


@dataclass(frozen=True)
class TileMedium(SeenMedium):
    """Pictures of any size in tiles, of each the whole in one and its parts in others: values
    `[pictures, tiles, channels, side, side]`, behind those of a picture zeros.
    """

    patch: int
    """Pixels along height and width of a patch."""
    channels: int
    tile: int
    """Pixels along height and width of a tile."""
    canvases: tuple[Size, ...]
    """Heights and widths in pixels that the parts can have together, see `choose_canvas`."""
    sizes: str
    """The key with the pixels of each picture before that in height and width, int
    `[pictures, 2]`.
    """
    counts: str | None = None
    """The key with the number of pictures that were given together, int `[groups]`: several are
    each seen as a whole alone. None: all pictures are seen in parts too.
    """
    most: int | None = None
    """How many tiles the features of a picture's parts can fill, into which more are shrunk."""
    joined = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(each % self.tile for canvas in self.canvases for each in canvas):
            raise ConversionError(
                f"pictures are cut into tiles of {self.tile} pixels, and not all of "
                f"{self.canvases} are multiples of that"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.values, *(() if self.counts is None else (self.counts,)), self.sizes)

    @property
    def indivisible(self) -> int:
        return self._count_tiles(self.least, False) * self.of_tile

    @property
    def least(self) -> Size:
        """The height and width of the smallest picture that is seen in parts."""
        return min(self.canvases, key=math.prod)

    @property
    def of_tile(self) -> int:
        """The patches of a tile."""
        return (self.tile // self.patch) ** 2

    def list_tiles(self, given: OfRow) -> list[int]:
        """How many tiles of each picture of a row are seen."""
        return [self._count_tiles(*picture) for picture in self._list_pictures(given)]

    def count_patches(self, given: OfRow) -> int:
        return sum(self.list_tiles(given)) * self.of_tile

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of each picture. Each row of features of the parts, and a picture without
        parts, is followed by one more.
        """
        tokens, side = list[int](), self.tile // self.patch
        for size, alone in self._list_pictures(given):
            rows, columns = 1, 0
            if not alone:
                height, width = choose_canvas(size, self.canvases)
                grid = height // self.tile * side, width // self.tile * side
                rows, columns = crop_padding(grid, size)
                if self.most is not None:
                    rows, columns = shrink((rows, columns), self.most * self.of_tile)
            tokens.append(self.of_tile + rows * (columns + 1))
        return tokens

    def _count_tiles(self, size: Size, alone: bool) -> int:
        return 1 + (not alone) * math.prod(choose_canvas(size, self.canvases)) // self.tile**2

    def _list_pictures(self, given: OfRow) -> list[tuple[Size, bool]]:
        """Of each picture height and width, and whether it is seen as a whole alone."""
        sizes = given[self.sizes]
        if sizes is None:
            return []
        counts = [1] * len(sizes)
        if self.counts is not None and (groups := given[self.counts]) is not None:
            counts = [count for count in groups.tolist() for _ in range(count)]
        return [
            ((height, width), count > 1)
            for (height, width), count in zip(sizes.tolist(), counts, strict=True)
        ]

    def make_picture(self, patches: Size, make: Make) -> Found:
        tiles = self.indivisible // self.of_tile
        values = make(1, tiles, self.channels, self.tile, self.tile)
        found = {self.values: values, self.sizes: torch.tensor([self.least])}
        return found if self.counts is None else found | {self.counts: torch.tensor([1])}

    def _check(self, row: int, given: Found) -> None:
        values, sizes = given[self.values], given[self.sizes]
        of_tile = (self.channels, self.tile, self.tile)
        if values.ndim != 5 or values.shape[2:] != of_tile:
            shape = f"[pictures, tiles, {', '.join(map(str, of_tile))}]"
            raise self._refuse_shape(row, values, f"the tiles of each picture, {shape}")
        legal = sizes.shape == (len(values), 2) and holds_integers(sizes.dtype)
        if not legal or (sizes < 1).any():
            raise BatchError(
                f"{self.sizes!r} has sizes {sizes.tolist()} in row {row}: pass the pixels in "
                f"height and width that each of the {len(values)} pictures had before it was cut "
                "into tiles"
            )
        if self.counts is not None:
            counts = given[self.counts]
            legal = counts.ndim == 1 and holds_integers(counts.dtype) and not (counts < 1).any()
            if not legal or int(counts.sum()) != len(values):
                raise BatchError(
                    f"{self.counts!r} has {counts.tolist()} in row {row}, which has {len(values)} "
                    f"pictures: pass how many were given together, [{len(values)}]"
                )
        tiles = self.list_tiles(given)
        if (most := max(tiles)) > values.size(1):
            raise BatchError(
                f"{self.values!r} has {values.size(1)} tiles of each picture in row {row}, but of "
                f"the sizes {sizes.tolist()} one has {most}: pass all that the model's "
                "processor makes"
            )
        for number, count in enumerate(tiles):
            if values[number, count:].any():
                raise BatchError(
                    f"{self.values!r} has more than zeros behind the {count} tiles that "
                    f"{self.keys[-1]!r} makes of picture {number} of row {row}: pass the sizes of "
                    "these pictures, in their order"
                )


@dataclass(frozen=True)
class FrameMedium(Medium):
    """Videos in whole frames of one size: values `[videos, frames, channels, side, side]`. Four
    neighbours among the features of a frame become one, and one more ends a video.
    """

    patch: int
    """Pixels along height and width of a patch."""
    channels: int
    tile: int
    """Pixels along height and width of a frame."""
    joined = True

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.values,)

    def count_patches(self, given: OfRow) -> int:
        return math.prod(self._measure(given)) * (self.tile // self.patch) ** 2

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of each video."""
        videos, frames = self._measure(given)
        of_frame = math.ceil(self.tile // self.patch / 2) ** 2
        return [frames * of_frame + 1] * videos

    def _measure(self, given: OfRow) -> Size:
        """How many videos a row has, and of how many frames each."""
        values = given[self.values]
        return (0, 0) if values is None else (values.size(0), values.size(1))

    def find_kind(self, values: torch.Tensor) -> Shape:
        return (values.size(1),)

    def _check(self, row: int, given: Found) -> None:
        values = given[self.values]
        of_frame = (self.channels, self.tile, self.tile)
        if values.ndim != 5 or values.shape[2:] != of_frame:
            shape = f"[videos, frames, {', '.join(map(str, of_frame))}]"
            raise self._refuse_shape(row, values, f"the frames of each video, {shape}")


@dataclass(frozen=True)
class FilmMedium(SeenMedium):
    """Videos of one size, of which neighbouring frames are read together: values `[videos, steps,
    channels of these frames, height, width]`. Other tokens stand between those of steps.
    """

    patch: int
    """Pixels along height and width of a patch."""
    channels: int
    refused: str = ""
    """Why the model's class cannot be trained on them, if it cannot."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.values,)

    def count_patches(self, given: OfRow) -> int:
        return self.count_tokens(given) * self.merged

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, step by step."""
        values = given[self.values]
        if values is None:
            return []
        videos, steps, _, *size = values.shape
        return [math.prod(each // (self.patch * self.side) for each in size)] * (videos * steps)

    def find_kind(self, values: torch.Tensor) -> Shape:
        return tuple(values.shape[1:])

    def make_picture(self, patches: Size, make: Make) -> Found:
        return {self.values: make(1, 1, self.channels, *(each * self.patch for each in patches))}

    def _check(self, row: int, given: Found) -> None:
        values, step = given[self.values], self.patch * self.side
        if self.refused:
            raise BatchError(f"row {row} has {self.values!r}: {self.refused}")
        legal = values.ndim == 5 and values.size(2) == self.channels
        if not legal or any(each % step for each in values.shape[3:]):
            shape = f"[videos, steps, {self.channels}, height, width]"
            wanted = f"videos as the model's processor packs frames, {shape}, the last two"
            raise self._refuse_shape(row, values, f"{wanted} multiples of {step}")


def choose_canvas(picture: Size, canvases: Sequence[Size]) -> Size:
    """The canvas on which most pixels of a picture are left when it is made to fit; the smallest of
    several such, or the first of these.
    """
    height, width = picture

    def rank(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        left = min(int(width * scale) * int(height * scale), height * width)
        return left, -math.prod(canvas)

    return max(canvases, key=rank)


def crop_padding(grid: Size, picture: Size) -> Size:
    """The rows and columns of features of a canvas without those on both sides of a picture that
    was made to fit on it.
    """
    (rows, columns), (height, width) = grid, picture
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def shrink(grid: Size, most: int) -> Size:
    """The rows and columns after those of a grid are made fewer, in the same ratio, if they have
    clearly more than `most` features together.
    """
    ratio = math.sqrt(math.prod(grid) / most)
    return grid if ratio <= _EXCESS else (int(grid[0] // ratio), int(grid[1] // ratio))
