"""What surrounds a decoder that also sees pictures or hears sound, in numbers: tensors, inputs,
placeholders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_policy.errors import ConversionError

from .media import Medium, OfRow, SeenMedium, Shape, SoundMedium

SAY_DRAWN = ("mm_token_type_ids", "token_type_ids", "token_mask")
"""The keys of a batch of which the first that is there says what was drawn, see `find_drawn`."""


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
    deep: int = 0
    """How many of the decoder's first layers have features added to what they return."""
    both_ways: bool = False
    """Whether the tokens of a picture, those of one medium that are neighbours, see each other in
    both directions, as far as a window reaches back.
    """
    heads: int = 0
    """Of the tower's attention, where files have rows of heads in another order; else 0."""
    optional: str = ""
    """The end of names of tensors that files can all lack: they are as transformers makes them, and
    not trained.
    """

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConversionError("what surrounds the decoder has no tensors")

    @property
    def attachments(self) -> tuple[str, ...]:
        """The keys of a batch that it reads."""
        return tuple(key for medium in self.media for key in medium.keys)

    def leave_out_optional(self) -> Shell:
        """The same without its `optional` tensors."""
        own = (pair for pair in self.tensors if not pair[0].endswith(self.optional))
        return replace(self, tensors=tuple(own))

    def find_types(self, batch: Mapping[str, Any], text_BS: torch.Tensor) -> torch.Tensor:
        """Int64 `[B, S]`: the number of the medium, from 1 on, whose feature takes the place of a
        token, and 0 for text. `text_BS` is False behind rows' ends. Placeholders that were drawn,
        see `find_drawn`, are text.
        """
        tokens_BS, drawn_BS = batch["input_ids"], self.find_drawn(batch)
        types_BS = torch.zeros_like(tokens_BS)
        for number, medium in enumerate(self.media, start=1):
            for row, at_S in enumerate((tokens_BS == medium.placeholder) & text_BS):
                count = medium.count_tokens(pick_row(medium, batch, row))
                types_BS[row, choose_placeholders(at_S, drawn_BS[row], count)] = number
        return types_BS

    def find_drawn(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Bool `[B, S]`: the tokens that are text even if they are placeholders, as the policy has
        drawn them. `mm_token_type_ids` are 0 there, or `token_type_ids` if they say which tokens
        see each other. Without types `token_mask` counts what was drawn, unless it also counts one
        of the row's first two tokens: a prompt has more, and a mask of all tokens that others
        predict leaves out the first alone. Without all of them nothing was drawn.
        """
        of_all, of_pictures, mask = SAY_DRAWN
        for key in (of_all, of_pictures) if self.both_ways else (of_all,):
            if key in batch:
                text_BS: torch.Tensor = batch[key] == 0
                return text_BS
        counted_BS: torch.Tensor = batch.get(mask, torch.zeros_like(batch["input_ids"])) != 0
        return counted_BS & ~counted_BS[:, :2].any(1, keepdim=True)

    @property
    def text(self) -> int:
        """A token that nothing else than text is made of."""
        named = {each for m in self.media for each in (m.placeholder, m.start)}
        return next(each for each in itertools.count() if each not in named)

    @property
    def pictures(self) -> SeenMedium:
        """The pictures that it reads, videos aside."""
        found = self.media[0]
        assert isinstance(found, SeenMedium)
        return found

    @property
    def sounds(self) -> list[SoundMedium]:
        """The kinds of clips of sound that it reads."""
        return [medium for medium in self.media if isinstance(medium, SoundMedium)]

    def split_rows(self, batch: Mapping[str, Any], rows: Sequence[int]) -> list[list[int]]:
        """The numbers `rows` of rows of a batch, those together of which the model's class takes
        what they have at once: their videos are alike, and placeholders that several
        media have are of the same one. If it would read sound of some otherwise beside others, each
        row is taken by itself.
        """
        if any(each.is_mixed(pick_row(each, batch, row)) for each in self.media for row in rows):
            return [[row] for row in rows]
        found: dict[Shape, list[int]] = {}
        for row in rows:
            kind: Shape = ()
            for number, medium in enumerate(self.media):
                if (values := pick_row(medium, batch, row)[medium.values]) is not None:
                    kind += medium.find_kind(values) + (number,) * bool(self.list_rivals(medium))
            found.setdefault(kind, []).append(row)
        return [*found.values()]

    def list_rivals(self, medium: Medium) -> list[Medium]:
        """Other media with the same placeholder."""
        same = (each for each in self.media if each.placeholder == medium.placeholder)
        return [each for each in same if each != medium]

    def join(self, batch: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """What the model's class takes of all rows, by key, where any row has something."""
        found = {key: [each for each in rows if each is not None] for key, rows in batch.items()}
        joined = {key: join_rows(rows) for key, rows in found.items() if rows}
        for medium in self.media:
            if medium.values in joined:
                joined[medium.values] = medium.arrange(joined[medium.values])
        return joined


def pick_row(medium: Medium, batch: Mapping[str, Any], row: int) -> OfRow:
    """What a row of a batch has for a medium."""
    return {key: batch[key][row] if key in batch else None for key in medium.keys}


def choose_placeholders(at_S: torch.Tensor, drawn_S: torch.Tensor, count: int) -> torch.Tensor:
    """Of a row's placeholders `at_S` those whose places features take, bool `[S]`: all that the
    policy has not drawn if there are `count` of them, else the first ones.
    """
    given_S = at_S & ~drawn_S
    return given_S if int(given_S.sum()) == count else at_S & (at_S.cumsum(0) <= count)


def join_rows(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """What rows have for a tower, one after another; pictures of different sizes are filled up with
    zeros to the largest.
    """
    sizes = [max(each) for each in zip(*(value.shape[1:] for value in values), strict=True)]
    if all([*value.shape[1:]] == sizes for value in values):
        return torch.cat([*values])
    joined = values[0].new_zeros(sum(map(len, values)), *sizes)
    for value, place in zip(values, joined.split([*map(len, values)]), strict=True):
        place[tuple(map(slice, value.shape))] = value
    return joined
