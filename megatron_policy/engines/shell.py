"""What surrounds a decoder that also sees pictures or hears sound: transformers' own composite
model, see `composite`, is called for what the decoder is given. So no line of a family's towers,
projectors and positions is written here.

Shapes: B rows and S positions of the caller, T positions that a context-parallel rank computes, R
rows of them, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_policy.converters.architecture import Shell
from megatron_policy.device import to_device
from megatron_policy.interfaces.embedder import Embedder, Entering
from megatron_policy.packing.microbatch import Microbatch, find_blocks, inside
from megatron_policy.packing.tokens import Blocks

from .composite import (
    DEEP,
    DEEP_AT,
    FEATURES,
    MASK,
    MASKS,
    POSITIONS,
    TYPES,
    DecoderRecorder,
    makes_positions,
    takes_types,
)

_SEEN = 8
"""Numbers of a tensor by which two are told apart before all are compared."""


class _GiveAll(torch.autograd.Function):
    """Hidden states as they are. Parameters get gradients of zero beside those that they have from
    pictures, if any: who waits for a gradient of each of them would wait in vain for one of those
    that no feature is made with.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, *(each.new_zeros(()).expand_as(each) for each in ctx.parameters)


class _HandBack(torch.autograd.Function):
    """Hidden states as they are. The backward pass, which comes after that of all layers, hands on
    what the leaves have collected, to the features that they are copies of. Layers that are
    computed again reach the leaves alone, so what made the features is walked through once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, leaves: tuple[torch.Tensor, ...], *deep: torch.Tensor
    ) -> torch.Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, *(leaf.grad for leaf in ctx.leaves)


def has_trained(module: torch.nn.Module) -> bool:
    """Whether any of its parameters is to learn."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _spread(each_ND: torch.Tensor, at_BS: torch.Tensor) -> torch.Tensor:
    """`[B, S, D]`: the features where they belong, 0 elsewhere."""
    spread_BSD = each_ND.new_zeros(*at_BS.shape, each_ND.size(-1))
    return spread_BSD.masked_scatter(at_BS.unsqueeze(-1), each_ND)


def _join_deep(given: Sequence[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """`[U, S, D]` for each of the first layers: features of all calls where they belong, 0
    elsewhere.
    """
    for layer in range(max(len(each.get(DEEP, ())) for each in given)):
        yield torch.cat(
            [
                _spread(each[DEEP][layer], each[DEEP_AT])
                if DEEP in each
                else torch.zeros_like(each[FEATURES])
                for each in given
            ]
        )


@dataclass(frozen=True)
class PictureEmbedder:
    """The embedding of text, in which features take the place of placeholders. See `Embedder`."""

    text: Embedder
    shell: Shell
    composite: torch.nn.Module
    """With parameters only where the embedding is; elsewhere it computes positions alone."""
    place: Callable[[Microbatch, torch.Tensor], torch.Tensor]
    """From values `[B, S, ...]` of a microbatch's rows to this rank's, in the form in which the
    first layer takes hidden states.
    """
    learns: bool
    """Whether any parameter of the composite model is trained; without one there is no graph."""

    @property
    def attachments(self) -> tuple[str, ...]:
        return self.shell.attachments

    def embed(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        return self.text.embed(tokens_RT)

    def enter(self, tokens_RT: torch.Tensor, microbatch: Microbatch) -> Entering:
        hidden = self.text.embed(tokens_RT)
        types_BS = self._find_types(microbatch)
        trained = [p for p in self.composite.parameters() if p.requires_grad]
        if trained and torch.is_grad_enabled():
            hidden = _GiveAll.apply(hidden, *trained)  # type: ignore[no-untyped-call]
        if not types_BS.any():
            return Entering(hidden)
        data = microbatch.host.data
        columns = [data.get(key, [None] * len(types_BS)) for key in self.attachments]
        first_B = _find_same(list(zip(*columns, strict=True)))
        rows = [row for row in dict.fromkeys(first_B) if types_BS[row].any()]
        groups = self.shell.split_rows(data, rows)
        rows = [row for group in groups for row in group]
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            given = [self._read(microbatch, types_BS, group) for group in groups]
        source_BS = to_device(_find_sources(types_BS, first_B, rows))

        def give(values_USD: torch.Tensor) -> torch.Tensor:
            """To every row that has them, in this rank's form; 0 for text."""
            last = values_USD.new_zeros(1, values_USD.size(-1))
            return self.place(microbatch, torch.cat([values_USD.flatten(0, 1), last])[source_BS])

        where = self.place(microbatch, source_BS >= 0).unsqueeze(-1)
        features_USD = torch.cat([each[FEATURES] for each in given])
        hidden = torch.where(where, give(features_USD).to(hidden.dtype), hidden)
        deep = tuple(map(give, _join_deep(given)))
        if not any(each.requires_grad for each in deep):
            return Entering(hidden, deep)
        # Layers add leaves of the graph.
        leaves = tuple(each.detach().requires_grad_() for each in deep)
        return Entering(_HandBack.apply(hidden, leaves, *deep), leaves)  # type: ignore[no-untyped-call]

    def _read(
        self, microbatch: Microbatch, types_BS: torch.Tensor, rows: list[int]
    ) -> dict[str, Any]:
        """What the decoder is given of these rows."""
        keys = {key: microbatch.attached(key, rows) for key in self.attachments}
        for key in (medium.values for medium in self.shell.media):
            dtype: Any = self.composite.dtype  # not every tower begins with that
            keys[key] = [None if each is None else each.to(dtype) for each in keys[key]]
        # Positions are made for themselves, see there.
        media = self.shell.join(keys) | {POSITIONS: torch.zeros((), dtype=torch.long)}
        ids_US = microbatch.host.data["input_ids"][rows]
        return self._call(to_device(ids_US), to_device(types_BS[rows]), media)

    def positions(self, microbatch: Microbatch) -> torch.Tensor | None:
        types_BS = self._find_types(microbatch)
        if not (types_BS.any() and makes_positions(self.composite)):
            return None
        data = microbatch.host.data
        values = {medium.values for medium in self.shell.media}
        keys = {key: data.get(key, []) for key in self.attachments if key not in values}
        with torch.no_grad():
            given = self._call(data["input_ids"], types_BS, self.shell.join(keys))
        positions: torch.Tensor | None = given.get(POSITIONS)
        # Where there are four, the first one is that of text.
        return None if positions is None else to_device(positions[-3:].permute(1, 2, 0))

    def find_blocks(self, microbatch: Microbatch) -> Blocks:
        return find_blocks(self.shell, microbatch.host.data)

    def _call(
        self, ids_BS: torch.Tensor, types_BS: torch.Tensor, more: dict[str, Any]
    ) -> dict[str, Any]:
        """What the decoder is given."""
        other, before_BS = self.shell.text, F.pad(types_BS[:, 1:] != 0, (0, 1))
        for medium in self.shell.media:
            # What the policy has drawn is text.
            drawn_BS = (ids_BS == medium.placeholder) & (types_BS == 0)
            if medium.start is not None:
                drawn_BS |= (ids_BS == medium.start) & ~before_BS
                more = more | {MASK: torch.ones_like(ids_BS)}
            ids_BS = ids_BS.masked_fill(drawn_BS, other)
        if takes_types(self.composite):
            more = more | {TYPES: types_BS.int()}
        if self.shell.both_ways:
            more = more | {MASK: MASKS}
        self.composite(input_ids=ids_BS, use_cache=False, **more)
        decoder = next(
            each for each in self.composite.children() if isinstance(each, DecoderRecorder)
        )
        return decoder.take()

    def _find_types(self, microbatch: Microbatch) -> torch.Tensor:
        """What each token's place is taken by, on the host."""
        data = microbatch.host.data
        return self.shell.find_types(data, inside(data))


def _find_same(media_B: Sequence[tuple[torch.Tensor | None, ...]]) -> list[int]:
    """For each row, the first one that has the same: rows are often answers to one prompt, and
    travel from process to process as copies of it.
    """
    known: dict[Any, list[int]] = {}
    found = []
    for row, media in enumerate(media_B):
        key = tuple(None if m is None else (m.shape, *m.flatten()[:_SEEN].tolist()) for m in media)
        alike = known.setdefault(key, [])
        same = (first for first in alike if _are_equal(media, media_B[first]))
        found.append(next(same, row))
        if found[-1] == row:
            alike.append(row)
    return found


def _are_equal(
    media: tuple[torch.Tensor | None, ...], others: tuple[torch.Tensor | None, ...]
) -> bool:
    pairs = zip(media, others, strict=True)
    return all(m is o or (m is not None and o is not None and torch.equal(m, o)) for m, o in pairs)


def _find_sources(types_BS: torch.Tensor, first_B: list[int], rows: list[int]) -> torch.Tensor:
    """Int64 `[B, S]`: which token, among all those of `rows`, has the feature of each token; -1 for
    text. `first_B` are the rows that have the same media.
    """
    source_BS = torch.full_like(types_BS, -1)
    for row, first in enumerate(first_B):
        if first in rows:
            own, others = _order(types_BS[row]), _order(types_BS[first])
            source_BS[row, own] = others + rows.index(first) * types_BS.size(1)
    return source_BS


def _order(types_S: torch.Tensor) -> torch.Tensor:
    """The positions of features, medium by medium."""
    order: torch.Tensor = types_S.argsort(stable=True)
    return order[int((types_S == 0).sum()) :]
