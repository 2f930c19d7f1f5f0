"""Kinds of inputs beside text: what a row has for a tower, how many tokens' places it takes, and
what of it is refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError, ConversionError

OfRow = Mapping[str, torch.Tensor | None]
"""What a row has for a tower, by the key of a batch."""
Found = dict[str, torch.Tensor]
"""The same of a row that has all that belongs together."""
Size = tuple[int, int]
"""Height and width."""
Shape = tuple[int, ...]
Make = Callable[..., torch.Tensor]
"""Makes a tensor of the shape that it is called with."""


@dataclass(frozen=True)
class Medium(ABC):
    """A kind of input beside text. Its features take the places of the tokens `placeholder`. See
    `PatchMedium`, `PictureMedium` and `SoundMedium`, and the others of `tiles`.
    """

    placeholder: int
    values: str
    """The key of a batch with what a tower reads: of each row a tensor, or None."""
    start: int | None = field(default=None, kw_only=True)
    """The token that stands before each picture or clip, if the model's class finds them by it to
    make positions. Another one stands behind.
    """
    joined: ClassVar[bool] = False
    """Whether groups of tokens, see `list_groups`, can follow each other with nothing between."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The keys of a batch that belong to it."""

    @abstractmethod
    def count_patches(self, given: OfRow) -> int:
        """The patches of what a row has."""

    @abstractmethod
    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, whose places features take."""

    def count_tokens(self, given: OfRow) -> int:
        """The tokens of a row whose places features take."""
        return sum(self.list_groups(given))

    def find_kind(self, values: torch.Tensor) -> Shape:
        """What `values` of rows that are read at once have to have in common."""
        return ()

    def is_mixed(self, given: OfRow) -> bool:
        """Whether features of what a row has depend on what else is read at once."""
        return False

    def arrange(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all rows in the form that the model's class takes."""
        return values

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of the keys that either all rows with values have, or none."""
        return ()

    def check(self, row: int, given: OfRow) -> None:
        """BatchError, which names the `row`, unless what it has is legal, or nothing."""
        found = {key: value for key, value in given.items() if value is not None}
        if not found:
            return
        if empty := [key for key, value in found.items() if not value.numel()]:
            raise BatchError(
                f"{empty[0]!r} is empty in row {row}: pass None for a row that has nothing"
            )
        if missing := [key for key in given if key not in (*found, *self.optional)]:
            has = f"row {row} has {next(iter(found))!r} without {missing[0]!r}"
            raise BatchError(f"{has}: pass both, or None for both")
        if not (values := found[self.values]).is_floating_point():
            raise BatchError(
                f"{self.values!r} is {values.dtype} in row {row}: pass the floating-point numbers "
                "that the model's processor makes of pixels and sound"
            )
        self._check(row, found)

    @abstractmethod
    def _check(self, row: int, given: Found) -> None:
        """The same of a row that has all that belongs to it."""

    def _refuse_shape(self, row: int, values: torch.Tensor, wanted: str) -> BatchError:
        shape = [*values.shape]
        return BatchError(f"{self.values!r} has shape {shape} in row {row}: pass {wanted}")


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

    @abstractmethod
    def make_picture(self, patches: Size, make: Make) -> Found:
        """A picture of so many patches in height and width or as large as it has to be: what `make`
        gives for the shape of its values, and their size, by key.
        """

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
    """The key with the patches of each picture in time, height and width, int `[pictures, 3]`, or
    in height and width alone if it is `flat`.
    """
    patch: Shape
    """The shape of a patch's values."""
    by_frame: bool = False
    """Whether other tokens stand between the placeholders of frames of a video."""
    still: bool = False
    """Whether each has a single frame."""
    flat: bool = False
    """Whether grids say nothing of time, int `[pictures, 2]`."""
    seconds: str | None = None
    """The key with the seconds from patch to patch in time of each video, `[videos]`, if the class
    reads them.
    """
    timeless: bool = False
    """Whether the class computes without these seconds too."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.values, *filter(None, [self.seconds]), self.grids)

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.seconds,) if self.seconds and self.timeless else ()

    def count_patches(self, given: OfRow) -> int:
        values = given[self.values]
        return 0 if values is None else len(values)

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, picture by picture or frame by frame."""
        grids, found = given[self.grids], list[int]()
        for *times, height, width in [] if grids is None else grids.tolist():
            tokens, frames = height * width // self.merged, math.prod(times)
            found += [tokens] * frames if self.by_frame else [tokens * frames]
        return found

    def make_picture(self, patches: Size, make: Make) -> Found:
        values = make(math.prod(patches), *self.patch)
        grid = patches if self.flat else (1, *patches)
        return {self.values: values, self.grids: torch.tensor([grid])}

    def _check(self, row: int, given: Found) -> None:
        values, grids = given[self.values], given[self.grids]
        seconds = given.get(self.seconds or "")
        sides, axes = (2, "") if self.flat else (3, "time, ")
        legal = grids.ndim == 2 and grids.size(1) == sides and holds_integers(grids.dtype)
        if not legal or not len(grids) or (grids < 1).any() or (grids[:, -2:] % self.side).any():
            raise BatchError(
                f"{self.grids!r} has {grids.tolist()} in row {row}: pass integers [pictures, "
                f"{sides}], the patches in {axes}height and width, of which the last two are "
                f"multiples of {self.side}"
            )
        if values.shape[1:] != self.patch:
            wanted = ", ".join(map(str, self.patch))
            shape = f"[patches, {wanted}], as the model's processor makes it"
            raise self._refuse_shape(row, values, shape)
        if self.still and (grids[:, 0] > 1).any():
            raise BatchError(
                f"{self.grids!r} has {grids.tolist()} in row {row}: these are pictures, "
                "which have one frame"
            )
        patches = int(grids.prod(-1).sum())
        if len(values) != patches:
            raise BatchError(
                f"{self.values!r} has {len(values)} patches in row {row}, but {self.grids!r} count "
                f"{patches}"
            )
        if seconds is not None and (seconds.shape != (len(grids),) or not (seconds > 0).all()):
            raise BatchError(
                f"{self.seconds!r} has {seconds.tolist()} in row {row}: pass a positive number of "
                f"seconds from patch to patch for each of {len(grids)} videos"
            )


@dataclass(frozen=True)
class PictureMedium(SeenMedium):
    """Whole pictures: values `[pictures, channels, height, width]`, of pixels."""

    patch: int
    """Pixels along height and width of a patch."""
    channels: int
    sizes: str | None = None
    """The key with the pixels of each picture that count, in height and width, int `[pictures, 2]`,
    where a row's pictures can differ in them; None: all count.
    """
    further: int = 0
    """Tokens of a picture beside those of its patches."""
    fixed: tuple[int, int] | None = None
    """The height and width that every picture has to have."""
    joined = True
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
        return (self.values,) if self.sizes is None else (self.values, self.sizes)

    @property
    def indivisible(self) -> int:
        return math.prod(each // self.patch for each in self.fixed) if self.fixed else self.merged

    def count_patches(self, given: OfRow) -> int:
        return int((self._measure(given) // self.patch).prod(-1).sum())

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of each picture; where pictures differ in size, of each row of its tokens."""
        sizes = (self._measure(given) // (self.patch * self.side)).tolist()
        if self.sizes is None:
            return [height * width + self.further for height, width in sizes]
        return [width for height, width in sizes for _ in range(height)]

    def _measure(self, given: OfRow) -> torch.Tensor:
        """The pixels of each picture that count, in height and width, int `[pictures, 2]`."""
        values = given[self.values]
        if values is None:
            return torch.empty(0, 2, dtype=torch.long)
        sizes = None if self.sizes is None else given[self.sizes]
        return torch.tensor([values.shape[-2:]] * len(values)) if sizes is None else sizes

    def arrange(self, values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(0) if self.by_row else values

    def make_picture(self, patches: Size, make: Make) -> Found:
        size = self.fixed or tuple(each * self.patch for each in patches)
        found = {self.values: make(1, self.channels, *size)}
        return found if self.sizes is None else found | {self.sizes: torch.tensor([size])}

    def _check(self, row: int, given: Found) -> None:
        values = given[self.values]
        most, step = values.shape[2:], self.patch * self.side
        legal = values.ndim == 4 and values.size(1) == self.channels
        if not legal or self.fixed not in (None, tuple(most)):
            shape = ", ".join(map(str, self.fixed or ("height", "width")))
            wanted = f"whole pictures, [pictures, {self.channels}, {shape}]"
            raise self._refuse_shape(row, values, wanted)
        if self.by_row and (blank := [n for n, each in enumerate(values) if not each.any()]):
            raise BatchError(
                f"{self.values!r} has nothing but zeros in picture {blank[0]} of row {row}: the "
                "model's class leaves such pictures out. Leave out those that fill a row up"
            )
        if self.fixed is not None:
            return
        sizes = self._measure(given)
        legal = sizes.shape == (len(values), 2) and holds_integers(sizes.dtype)
        legal = legal and bool(((sizes > 0) & (sizes <= torch.tensor(most))).all())
        if not legal or (sizes % step).any():
            raise BatchError(
                f"{self.sizes or self.values!r} has sizes {sizes.tolist()} in row {row}: pass the "
                f"pixels of each of the {len(values)} pictures in height and width, multiples of "
                f"{step} up to {[*most]}"
            )
        for number, (height, width) in enumerate(sizes.tolist()):
            if values[number, :, height:].any() or values[number, ..., width:].any():
                raise BatchError(
                    f"{self.values!r} has more than zeros behind the {height} x {width} pixels "
                    f"that {self.sizes!r} says of picture {number} of row {row}: pass the sizes of "
                    "these pictures, in their order"
                )


@dataclass(frozen=True)
class SoundMedium(Medium):
    """Clips of sound: values `[clips, bins, frames]`, the frames of shorter ones filled up, or
    `[clips, frames, bins]` if `bins_last`.
    """

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
    bins_last: bool = False
    beyond: int = 0
    """Frames that have to be there behind those of a clip that count."""

    @property
    def keys(self) -> tuple[str, ...]:
        return self.values, self.mask

    def make_clip(self, frames: int, make: Make) -> Found:
        """A clip of so many frames: what `make` gives for the shape of its values, and their mask,
        by key.
        """
        mask = (torch.arange(frames + self.beyond) < frames).long().unsqueeze(0)
        frame = (frames + self.beyond, self.bins)
        return {self.values: make(1, *(frame if self.bins_last else frame[::-1])), self.mask: mask}

    def list_groups(self, given: OfRow) -> list[int]:
        """The tokens of a row that stand together, clip by clip."""
        return [self._count(frames) for frames in self._measure(given)]

    def count_patches(self, given: OfRow) -> int:
        """What a row's clips count among its patches: as many as their tokens."""
        return self.count_tokens(given)

    def is_mixed(self, given: OfRow) -> bool:
        clips = self._measure(given)
        return self.mixed and any(self.chunk is None or frames < self.chunk for frames in clips)

    def _measure(self, given: OfRow) -> list[int]:
        """The frames of each clip that count."""
        mask = given[self.mask]
        return [] if mask is None else [int(each) for each in mask.sum(-1).tolist()]

    def _count(self, frames: int) -> int:
        chunks, rest = divmod(frames, self.chunk) if self.chunk else (0, frames)
        parts = (chunks, self.chunk or 0), (1, rest)
        return sum(times * ((each + self.spare) // self.stride) for times, each in parts)

    def _check(self, row: int, given: Found) -> None:
        values, mask = given[self.values], given[self.mask]
        frames, bins = (-2, -1) if self.bins_last else (-1, -2)
        if values.ndim != 3 or values.size(bins) != self.bins:
            order = f"frames, {self.bins}" if self.bins_last else f"{self.bins}, frames"
            wanted = f"[clips, {order}], as the model's processor makes it of sound"
            raise self._refuse_shape(row, values, wanted)
        shape = [values.size(0), values.size(frames)]
        whole = mask.dtype == torch.bool or holds_integers(mask.dtype)
        whole = whole and [*mask.shape] == shape and mask.numel() > 0
        first = torch.arange(shape[1]) < mask.long().sum(-1, keepdim=True)
        if not whole or not torch.equal(first.long(), mask.long()):
            raise BatchError(
                f"{self.mask!r} is {mask.dtype} of shape {[*mask.shape]} in row {row}: pass 1 for "
                f"the first frames of each clip and 0 for what fills it up, {shape}"
            )
        if (most := max(self._measure(given))) + self.beyond > shape[1]:
            raise BatchError(
                f"{self.values!r} has {shape[1]} frames in row {row}, and a clip of {most}: pass "
                f"{self.beyond} more behind the longest, as the model's processor does"
            )
        if 0 in (tokens := self.list_groups({self.mask: mask})):
            raise BatchError(
                f"clip {tokens.index(0)} of row {row} is too short for a token: leave it out, and "
                "its placeholder"
            )
