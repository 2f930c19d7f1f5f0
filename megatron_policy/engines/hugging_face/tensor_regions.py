"""How activations pass into and out of the parts of a model that tensor-parallel ranks share.

Shapes: R rows, T positions, D features of an activation `[R, T, D]`; under sequence parallelism
ranks have a share of the positions each wherever they compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_policy.engines.hugging_face.table import Holding, local_part
from megatron_policy.parallel.groups import (
    Pass,
    exchange,
    gather,
    sum_all,
    sum_scatter,
    take_part,
)

TOKENS, FEATURES = 1, -1
"""Dimensions of an activation."""


@dataclass
class TensorRegion:
    """The ranks that share every layer, and whether they split the positions between its parts."""

    group: dist.ProcessGroup
    splits_tokens: bool = False

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """In this context ranks do not split positions: one position cannot be split."""
        before, self.splits_tokens = self.splits_tokens, False
        try:
            yield
        finally:
            self.splits_tokens = before

    def enter(self, x: torch.Tensor, tokens: int = TOKENS) -> torch.Tensor:
        """All positions, for weights of which each rank has a share: the backward pass sums the
        ranks' gradients. Positions are along the dimension `tokens`.
        """
        if self.splits_tokens:
            return exchange(x, self._with(gather, tokens), self._with(sum_scatter, tokens))
        return exchange(x, _pass_on, self._with(sum_all))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, of all positions or of this rank's."""
        if self.splits_tokens:
            return exchange(x, self._with(sum_scatter, TOKENS), self._with(gather, TOKENS))
        return exchange(x, self._with(sum_all), _pass_on)

    def enter_alike(self, x: torch.Tensor) -> torch.Tensor:
        """All positions, for what every rank computes alike."""
        return self._gather(x, TOKENS) if self.splits_tokens else x

    def leave_alike(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's positions of what every rank has computed alike."""
        return self._own(x, TOKENS) if self.splits_tokens else x

    def gather_features(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' features, of which every rank computes the same."""
        return self._gather(x, FEATURES)

    def own_features(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of features that every rank has."""
        return self._own(x, FEATURES)

    def _gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        # Each rank has the whole gradient, so its own part is enough.
        return exchange(x, self._with(gather, dim), self._with(take_part, dim))

    def _own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return exchange(x, self._with(take_part, dim), self._with(gather, dim))

    def _with(self, collective: Callable[..., torch.Tensor], *dim: int) -> Pass:
        return lambda x: collective(x, self.group, *dim)


def _pass_on(x: torch.Tensor) -> torch.Tensor:
    return x


def sum_partial(trained: Sequence[Holding], group: dist.ProcessGroup) -> None:
    """Sum the gradients of which each rank of `group` has a part only; and over the ranks that hold
    copies of a share, each of which has what its own heads make of it.
    """
    mine, parts = [], []
    for each in trained:
        if each.tensor.grad is None or not (each.partial or each.cut.copies > 1):
            continue
        gradient = local_part(each.tensor.grad)
        sharing = group.size() if each.cut.dim is None else each.cut.copies
        # Each share has a place of its own in what is summed.
        part = gradient.new_zeros(group.size() // sharing, *gradient.shape)
        place = part[group.rank() // sharing]
        place.copy_(gradient)
        mine.append((gradient, place))
        parts.append(part.view(-1))
    if parts:
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed)
        for gradient, place in mine:
            gradient.copy_(place)
