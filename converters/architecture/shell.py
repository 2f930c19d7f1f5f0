"""What surrounds a decoder that also sees pictures, in numbers: tensors, inputs, placeholders."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_policy.errors import ConversionError


@dataclass(frozen=True)
class Medium:
    """A kind of input beside text. Its features take the places of the tokens `placeholder`."""

    placeholder: int
    values: str
    """The key of a batch with what a tower reads: pixels of patches `[patches, values]`, those of
    all pictures of a row one after another.
    """
    grids: str
    """The key with the patches of each picture in time, height and width, int `[pictures, 3]`."""
    width: int | None = None
    """The values of a patch; None if nothing says how many there are."""


@dataclass(frozen=True)
class Shell:
    """Towers and projectors of a composite model of transformers, all of it but its decoder, which
    is called with what they make of a batch.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name, within the composite model, and shape of each."""
    prefix: str
    """What their names begin with in a checkpoint."""
    media: tuple[Medium, ...]
    merged: int
    """Patches that make one token."""
    further: tuple[str, ...] = ()
    """Keys of a batch that it reads beside those of its media: a tensor, or None, for each row."""
    deep: int = 0
    """How many of the decoder's first layers have features added to what they return."""

    def __post_init__(self) -> None:
        if not self.tensors or self.merged < 1:
            raise ConversionError(
                f"what surrounds the decoder has {len(self.tensors)} tensors and makes a token of "
                f"{self.merged} patches; both must be 1 or more"
            )

    @property
    def attachments(self) -> tuple[str, ...]:
        """The keys of a batch that it reads."""
        keys = (key for medium in self.media for key in (medium.values, medium.grids))
        return (*keys, *self.further)

    @property
    def patch_values(self) -> int:
        """The values of a patch: the inputs of the first convolution."""
        return next(math.prod(shape[1:]) for _, shape in self.tensors if len(shape) > 2)

    def count_tokens(self, grids: torch.Tensor | None) -> int:
        """The tokens of a row that pictures with these `grids` take."""
        return 0 if grids is None else int(grids.prod(-1).sum()) // self.merged
