"""Which elements of a trainer's parameter are among some indices of one dimension of a Hugging Face
tensor, and where they belong in a tensor that has these indices alone. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_policy.converters.rows.regions import Region


class Move(NamedTuple):
    """Elements of a trainer's parameter, and where they belong in an engine rank's tensor."""

    own: Region
    to: Region


class IndexSpan:
    """Indices `low` to `high` of one dimension of a tensor, in one that has those from `begin` to
    `end`.
    """

    def __init__(
        self, shape: tuple[int, ...], dim: int, low: int, high: int, begin: int, end: int
    ) -> None:
        self._inner, self._size = math.prod(shape[dim + 1 :]), shape[dim]
        self._low, self._high, self._begin, self._length = low, high, begin, end - begin

    def moves(self, hf: Region, own: Region) -> Iterator[Move]:
        """The elements of a region of the tensor, `hf`, and of a parameter, `own`, that are among
        these indices.
        """
        at = hf.offset // self._inner % self._size
        along = [i for i, n in enumerate(hf.size) if n > 1 and not self._is_apart(hf.stride[i])]
        last = at + sum((hf.size[i] - 1) * hf.stride[i] // self._inner for i in along)
        reach = hf.offset % self._inner + sum(
            (n - 1) * s for n, s in zip(hf.size, hf.stride, strict=True) if s < self._inner
        )
        if not along and reach < self._inner:
            if self._low <= at < self._high:
                yield Move(own, self._to(hf))
        elif (
            len(along) == 1
            and reach < self._inner
            and last < self._size
            and hf.stride[along[0]] % self._inner == 0
        ):
            step = hf.stride[along[0]] // self._inner
            first = max(0, -(-(self._low - at) // step))
            end = min(hf.size[along[0]], -(-(self._high - at) // step))
            if first < end:
                box = [(0, n) for n in hf.size]
                box[along[0]] = first, end
                cut = hf.cut(tuple(box))
                yield Move(own.cut(tuple(box)), self._to(cut))
        else:
            yield from self._divide(hf, own)

    def _divide(self, hf: Region, own: Region) -> Iterator[Move]:
        """Those of a region of which a dimension is more than one of the tensor's, or of which two
        are along these indices.
        """
        for i, (n, s) in enumerate(zip(hf.size, hf.stride, strict=True)):
            for period in (self._inner, self._inner * self._size):
                count, over = divmod(period, s) if s < period else (n, 1)
                if not over and count < n and n % count == 0 and hf.offset % period == 0:
                    yield from self.moves(
                        _split_dimension(hf, i, count), _split_dimension(own, i, count)
                    )
                    return
        whole = self._inner * self._size
        widest = max(
            (i for i, n in enumerate(hf.size) if n > 1 and hf.stride[i] % whole),
            key=lambda i: hf.stride[i],
        )
        for index in range(hf.size[widest]):
            box = [(0, n) for n in hf.size]
            box[widest] = index, index + 1
            yield from self.moves(hf.cut(tuple(box)), own.cut(tuple(box)))

    def _is_apart(self, stride: int) -> bool:
        """Whether a step of a dimension does not change the index, if nothing is carried."""
        return stride < self._inner or stride % (self._inner * self._size) == 0

    def _to(self, hf: Region) -> Region:
        """The same elements in the tensor that has `begin` to `end`."""
        whole, own = self._inner * self._size, self._inner * self._length
        outer, within = divmod(hf.offset, whole)
        strides = tuple(s // whole * own if s % whole == 0 else s for s in hf.stride)
        return Region(hf.size, strides, outer * own + within - self._begin * self._inner)


def _split_dimension(region: Region, dim: int, count: int) -> Region:
    """The same elements with a dimension in two, of which the inner one has `count` indices."""
    size, stride = region.size[dim], region.stride[dim]
    return Region(
        (*region.size[:dim], size // count, count, *region.size[dim + 1 :]),
        (*region.stride[:dim], stride * count, stride, *region.stride[dim + 1 :]),
        region.offset,
    )
