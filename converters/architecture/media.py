"""Kinds of inputs beside text: what a row has for a tower, and how many tokens' places it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_policy.errors import ConversionError

OfRow = Mapping[str, torch.Tensor | None]
"""What a row has for a tower, by the key of a batch."""
Size = tuple[int, int]
"""Height and width."""
_EXCESS = 1.1
"""By which the sides of a grid can exceed those of the most features before they are shrunk."""


@dataclass(frozen=True)
class Medium:
    """A kind of input beside text. Its features take the places of the tokens `placeholder`. See
    `PatchMedium`, `PictureMedium`, `TileMedium`, `FrameMedium` and `SoundMedium`.
    """

    placeholder: int
    values: str
    """The key of a batch with what a tower reads: of each row a tensor, or None."""
    start: int | None = field(default=None, kw_only=True)
    """The token that stands before each picture or clip, if the model's class finds them by it to
    make positions. Another one stands behind.
    """


@dataclass(frozen=True)
class SeenMedium(Medium):
    """What is seen: patches of pictures or videos."""

    merged: int
    """Patches that make one token, a square of them."""

    def __post_init__(self) -> None:
        if self.merged < 1 or self.side**2 != self.merged:
            raise ConversionError(
                f"{self.merged} patches of {self.values} make a token: it must be a square"
            )

    @property
    def side(self) -> int:
        """The patches of a token along height and width."""
        return math.isqrt(self.merged)

    @property
    def indivisible(self) -> int:
        """The patches of which a row can have only a multiple."""
        return self.merged


@dataclass(frozen=True)
class PatchMedium(SeenMedium):
    """Pictures or videos cut into patches: values `[patches, *values of one]`, those of all
    pictures of a row one after another.
    """

    grids: str
    """The key with the patches of each picture in time, height and width, int `[pictures, 3]`."""
    patch: tuple[int, ...] | None = None
    """The shape of a patch's values; None if nothing says how many there are."""
    by_frame: bool = False
    """Whether other tokens stand between the placeholders of frames of a video."""
    still: bool = False
    """Whether each has a single frame."""
    seconds: str | None = None
    """The key with the seconds from patch to patch in time of each video, `[videos]`, if the class
    needs them.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""
        return (self.values, *filter(None, [self.seconds]), self.grids)

    def count_patches(self, given: OfRow) -> int:
        """The patches of what a row has."""
        values = given[self.values]
        return 0 if values is None else len(values)

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places its pictures take."""
        return sum(self.list_groups(given))

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, picture by picture or frame by frame."""
        grids, found = given[self.grids], list[int]()
        for times, height, width in [] if grids is None else grids.tolist():
            tokens = height * width // self.merged
            found += [tokens] * times if self.by_frame else [tokens * times]
        return found


@dataclass(frozen=True)
class PictureMedium(SeenMedium):
    """Whole pictures: values `[pictures, channels, height, width]`, of pixels."""

    patch: int
    """Pixels along height and width of a patch."""
    sizes: str | None = None
    """The key with the pixels of each picture that count, in height and width, int `[pictures, 2]`,
    where a row's pictures can differ in them; None: all count.
    """
    further: int = 0
    """Tokens of a picture beside those of its patches."""
    fixed: tuple[int, int] | None = None
    """The height and width that every picture has to have."""
    by_row: bool = False
    """Whether the model's class takes them as `[rows, pictures, ...]`, without those whose pixels
    are all zeros.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(each // self.patch % self.side for each in self.fixed or ()):
            raise ConversionError(
                f"pictures of {self.fixed} pixels have no whole number of tokens of {self.merged} "
                f"patches, each of {self.patch} x {self.patch} pixels"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""
        return (self.values,) if self.sizes is None else (self.values, self.sizes)

    @property
    def indivisible(self) -> int:
        return math.prod(each // self.patch for each in self.fixed) if self.fixed else self.merged

    def count_patches(self, given: OfRow) -> int:
        """The patches of what a row has."""
        return int((self._measure(given) // self.patch).prod(-1).sum())

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places its pictures take."""
        sizes_N2 = self._measure(given)
        tokens_N = (sizes_N2 // (self.patch * self.side)).prod(-1)
        return int(tokens_N.sum()) + self.further * len(sizes_N2)

    def _measure(self, given: OfRow) -> torch.Tensor:
        """The pixels of each picture that count, in height and width, int `[pictures, 2]`."""
        values = given[self.values]
        if values is None:
            return torch.empty(0, 2, dtype=torch.long)
        sizes = None if self.sizes is None else given[self.sizes]
        return torch.tensor([values.shape[-2:]] * len(values)) if sizes is None else sizes


@dataclass(frozen=True)
class TileMedium(SeenMedium):
    """Pictures of any size in tiles, of each the whole in one and its parts in others: values
    `[pictures, tiles, channels, side, side]`, behind those of a picture anything.
    """

    patch: int
    """Pixels along height and width of a patch."""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(each % self.tile for canvas in self.canvases for each in canvas):
            raise ConversionError(
                f"pictures are cut into tiles of {self.tile} pixels, and not all of "
                f"{self.canvases} are multiples of that"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""
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
        """The patches of what a row has."""
        return sum(self.list_tiles(given)) * self.of_tile

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places its pictures take. Each row of features of the parts,
        and a picture without parts, is followed by one more.
        """
        tokens, side = 0, self.tile // self.patch
        for size, alone in self._list_pictures(given):
            rows, columns = 1, 0
            if not alone:
                height, width = choose_canvas(size, self.canvases)
                grid = height // self.tile * side, width // self.tile * side
                rows, columns = crop_padding(grid, size)
                if self.most is not None:
                    rows, columns = shrink((rows, columns), self.most * self.of_tile)
            tokens += self.of_tile + rows * (columns + 1)
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


@dataclass(frozen=True)
class FrameMedium(SeenMedium):
    """Videos in whole frames of one size: values `[videos, frames, channels, side, side]`. Four
    neighbours among the features of a frame become one, and one more ends a video.
    """

    patch: int
    """Pixels along height and width of a patch."""
    tile: int
    """Pixels along height and width of a frame."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""
        return (self.values,)

    @property
    def indivisible(self) -> int:
        return (self.tile // self.patch) ** 2

    def count_patches(self, given: OfRow) -> int:
        """The patches of what a row has."""
        values = given[self.values]
        return 0 if values is None else math.prod(values.shape[:2]) * self.indivisible

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places its videos take."""
        values = given[self.values]
        if values is None:
            return 0
        videos, frames = values.shape[:2]
        of_frame = math.ceil(self.tile // self.patch / 2) ** 2
        return int(videos * (frames * of_frame + 1))


@dataclass(frozen=True)
class SoundMedium(Medium):
    """Clips of sound: values `[clips, bins, frames]`, the frames of shorter ones filled up."""

    mask: str
    """The key with 1 for each frame that counts and 0 for what fills up, `[clips, frames]`."""
    bins: int
    """Numbers of a frame."""
    stride: int
    """Frames that make a token."""
    spare: int
    """Frames that the last token of a clip, or of a chunk, can lack."""
    chunk: int | None = None
    """Frames that make tokens by themselves, the last ones of a clip if fewer; None: all of it."""
    mixed: bool = False
    """Whether features of clips shorter than a chunk depend on longer ones that are read at once.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""
        return self.values, self.mask

    def make_clip(self, frames: int, make: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        """A clip of so many frames: what `make` gives for the shape of its values, and their mask,
        by key.
        """
        mask = torch.ones(1, frames, dtype=torch.long)
        return {self.values: make(1, self.bins, frames), self.mask: mask}

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, clip by clip."""
        return [self._count(frames) for frames in self._measure(given)]

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places its clips take."""
        return sum(self.list_groups(given))

    def count_patches(self, given: OfRow) -> int:
        """What a row's clips count among its patches: as many as their tokens."""
        return self.count_tokens(given)

    def is_mixed(self, given: OfRow) -> bool:
        """Whether features of a row's clips depend on others that are read at once."""
        return self.mixed and any(frames < (self.chunk or 0) for frames in self._measure(given))

    def _measure(self, given: OfRow) -> list[int]:
        """The frames of each clip that count."""
        mask = given[self.mask]
        return [] if mask is None else [int(each) for each in mask.sum(-1).tolist()]

    def _count(self, frames: int) -> int:
        chunks, rest = divmod(frames, self.chunk) if self.chunk else (0, frames)
        parts = (chunks, self.chunk or 0), (1, rest)
        return sum(times * ((each + self.spare) // self.stride) for times, each in parts)


AnyMedium = PatchMedium | PictureMedium | TileMedium | FrameMedium | SoundMedium


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
