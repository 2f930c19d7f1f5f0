"""Applies deltas to whole tensors in host memory: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas.arrays import Bits, Positions
from megatron_policy.refit.deltas.codec import sum_elements, view_bits
from megatron_policy.refit.deltas.message import Fragment
from megatron_policy.refit.manifest import describe_problems


class OtherWeightsError(RefitError):
    """The weights to which a delta was applied are not those from which it was made."""


class _Overwritten(NamedTuple):
    target: Bits
    where: Positions
    values: Bits


class Patches:
    """Deltas that are applied to tensors, one after another, and can be undone."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are contiguous tensors by name, which are changed in place."""
        self._weights = weights
        self._overwritten: list[_Overwritten] = []
        self._digests: dict[tuple[str, tuple[Region, ...]], str] = {}

    def apply(self, fragments: Sequence[Fragment]) -> None:
        """Apply one message. RefitError if a fragment is of another model or malformed; what was
        applied before it remains until `undo`.
        """
        for fragment in fragments:
            weight = self._weights.get(fragment.tensor)
            if weight is None or (tuple(weight.shape), weight.dtype) != (
                fragment.shape,
                fragment.dtype,
            ):
                raise OtherWeightsError(
                    f"a delta changes {fragment.tensor} of shape {list(fragment.shape)} and "
                    f"{fragment.dtype}, which the weights here lack"
                )
            try:
                positions, values = fragment.decode()
            except ValueError as error:
                raise RefitError(f"a delta of {fragment.tensor} is malformed: {error}") from error
            target, where = view_bits(weight), fragment.locate(positions)
            self._overwritten.append(_Overwritten(target, where, target[where]))
            target[where] = values
            self._digests[fragment.tensor, fragment.regions] = fragment.digest

    def check(self) -> None:
        """OtherWeightsError unless every part of a tensor that was changed is now, with all its
        unchanged elements, what the trainer has.
        """
        differing = [
            name
            for (name, regions), stated in self._digests.items()
            if digest_regions(self._weights[name], regions) != stated
        ]
        if differing:
            raise OtherWeightsError(
                "the weights here are not those that the trainer has changed: "
                + describe_problems({"of the results have another digest": differing})
            )

    def undo(self) -> None:
        """Restore every tensor as it was."""
        for target, where, values in reversed(self._overwritten):
            target[where] = values
        self._overwritten.clear()
        self._digests.clear()


def digest_regions(weight: Tensor, regions: Sequence[Region]) -> str:
    """The sum of the elements of these regions of a contiguous tensor, one after another, in 16
    hexadecimal digits.
    """
    flat = weight.detach().reshape(-1)
    first = int(flat.storage_offset())
    parts = [flat.as_strided(of.size, of.stride, first + of.offset) for of in regions]
    own = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
    return f"{sum_elements(view_bits(own.contiguous())):016x}"
