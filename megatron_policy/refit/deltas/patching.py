"""Applies deltas to whole tensors in host memory: all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas.codec import sum_elements, view_bits
from megatron_policy.refit.deltas.message import Fragment
from megatron_policy.refit.manifest import describe_problems

_PLACE_BYTES = 8  # of an element

_Part = tuple[str, tuple[Region, ...]]  # of the tensor of that name


class OtherWeightsError(RefitError):
    """The weights to which a delta was applied are not those from which it was made."""


class Patches:
    """Deltas that are applied to tensors, one after another, and can be undone.

    For that, elements are kept as they were, with their places; or all of a part of a tensor, once
    this takes less. However many deltas there are, what is kept is at most twice as large as the
    weights.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are contiguous tensors by name, which are changed in place."""
        self._weights = weights
        self._overwritten: list[Callable[[], object]] = []  # what restores it
        self._kept: dict[_Part, int] = {}  # bytes of it
        self._digests: dict[_Part, str] = {}

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
            target, keeps_elements = view_bits(weight), self._keeps_elements(weight, fragment)
            try:
                for positions, values in fragment.decode():
                    where = fragment.locate(positions)
                    if keeps_elements:
                        restore = partial(target.__setitem__, where, target[where])
                        self._overwritten.append(restore)
                    target[where] = values
            except ValueError as error:
                raise RefitError(f"a delta of {fragment.tensor} is malformed: {error}") from error
            self._digests[fragment.tensor, fragment.regions] = fragment.digest

    def _keeps_elements(self, weight: Tensor, fragment: Fragment) -> bool:
        """Whether to keep the elements that are changed. If that takes more than the part of the
        tensor to which they belong, all of this is kept here.
        """
        key, size = (fragment.tensor, fragment.regions), fragment.dtype.itemsize
        whole, before = fragment.elements * size, self._kept.get(key, 0)
        if before >= whole:
            return False
        more = fragment.encoded.changes * (size + _PLACE_BYTES)
        if before + more < whole:
            self._kept[key] = before + more
            return True
        for part in _view_regions(weight, fragment.regions):
            self._overwritten.append(partial(part.copy_, part.clone()))
        self._kept[key] = before + whole
        return False

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
        for restore in reversed(self._overwritten):
            restore()
        self._overwritten.clear()
        self._kept.clear()
        self._digests.clear()


def digest_regions(weight: Tensor, regions: Sequence[Region]) -> str:
    """The sum of the elements of these regions of a contiguous tensor, one after another, in 16
    hexadecimal digits.
    """
    parts = _view_regions(weight, regions)
    own = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
    return f"{sum_elements(view_bits(own.contiguous())):016x}"


def _view_regions(weight: Tensor, regions: Sequence[Region]) -> list[Tensor]:
    flat = weight.detach().reshape(-1)
    first = int(flat.storage_offset())
    return [flat.as_strided(of.size, of.stride, first + of.offset) for of in regions]
