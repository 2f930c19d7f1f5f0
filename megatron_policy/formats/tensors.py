"""Access to a checkpoint's tensors by Hugging Face name, range by range, in any format.

A range is `count` elements of a tensor, flat in HF order, starting at element `first`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dequantising import (
    TEMPORARY,
    ByteMatrix,
    QuantisedTensor,
)
from megatron_policy.converters.formats.stored import Stored
from megatron_policy.converters.rows.blocks import Row, Shape, blocks_of
from megatron_policy.converters.rows.runs import Correspondence, Piece
from megatron_policy.converters.table import Entry


@dataclass(frozen=True)
class Info:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


class Tensors(Protocol):
    """A source or target of ranges of tensors."""

    def read(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        """Fill flat `values` with the range of that many elements; `scratch` is scratch memory."""

    def write(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        """Write flat `values` to that range."""

    def scratch(self, name: str, dtype: torch.dtype) -> int:
        """Bytes of scratch memory needed per element of a range in that dtype."""


class FileTensors:
    """Tensors stored whole in their files, as in safetensors; `quantised` are only read."""

    def __init__(
        self,
        stored: Mapping[str, Stored],
        files: RawFiles,
        quantised: Mapping[str, QuantisedTensor] = MappingProxyType({}),
    ) -> None:
        self.stored, self._files, self._quantised = stored, files, quantised

    def read(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        if name in self._quantised:
            self._quantised[name].read(first, values, self._fetch)
        else:
            _move(self._files.read, self.stored[name], first, values)

    def write(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        _move(self._files.write, self.stored[name], first, values)

    def scratch(self, name: str, dtype: torch.dtype) -> int:
        """None for plain tensors; torch allocates what dequantising takes."""
        return TEMPORARY if name in self._quantised else 0

    def _fetch(self, matrix: ByteMatrix, rows: range, columns: range) -> Tensor:
        """Bytes of a stored matrix, see `Fetch`."""
        found = torch.empty((len(rows), len(columns)), dtype=torch.uint8)
        start = matrix.start + columns.start
        if rows.step == 1 and len(columns) == matrix.width:
            self._files.read(
                matrix.path, start + rows.start * matrix.width, [flat_bytes(found.view(-1))]
            )
            return found
        for place, row in enumerate(rows):
            self._files.read(matrix.path, start + row * matrix.width, [flat_bytes(found[place])])
        return found


class TensorShare(NamedTuple):
    """The part of an HF tensor in one parameter, and where it is stored; a write can have several
    places.
    """

    stored: tuple[Stored, ...]
    block: Correspondence
    span: tuple[int, int]


class ParameterTensors:
    """Tensors whose elements are in Megatron-Core's parameters, along the blocks of their rows."""

    def __init__(self, shares: Mapping[str, Sequence[TensorShare]], files: RawFiles) -> None:
        self._shares, self._files = shares, files

    def read(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        found = 0
        for (stored, *_), piece in self._pieces(name, first, first + values.numel()):
            found += piece.elements
            if piece.is_plain and stored.dtype == values.dtype:
                for place, at, length in piece.common_runs():
                    _move(self._files.read, stored, at, values[place : place + length])
                continue
            dense = _dense(scratch, stored.dtype, piece)
            done = 0
            for at, length in piece.runs():
                _move(self._files.read, stored, at, dense[done : done + length])
                done += length
            _strided(values, piece).copy_(dense.view(piece.sizes))
        assert found == values.numel(), f"{name}: {found} of {values.numel()} elements"

    def write(self, name: str, first: int, values: Tensor, scratch: Tensor) -> None:
        for places, piece in self._pieces(name, first, first + values.numel()):
            for stored in places:
                if piece.is_plain and stored.dtype == values.dtype:
                    for place, at, length in piece.common_runs():
                        _move(self._files.write, stored, at, values[place : place + length])
                    continue
                dense = _dense(scratch, stored.dtype, piece)
                dense.view(piece.sizes).copy_(_strided(values, piece))
                done = 0
                for at, length in piece.runs():
                    _move(self._files.write, stored, at, dense[done : done + length])
                    done += length

    def scratch(self, name: str, dtype: torch.dtype) -> int:
        return max(
            0 if share.block.is_plain and stored.dtype == dtype else stored.dtype.itemsize
            for share in self._shares[name]
            for stored in share.stored
        )

    def _pieces(
        self, name: str, first: int, last: int
    ) -> Iterator[tuple[tuple[Stored, ...], Piece]]:
        for stored, block, (begin, end) in self._shares[name]:
            if begin < last and first < end:
                for piece in block.pieces(first, last):
                    yield stored, piece


def shares_of(
    entries: Sequence[Entry], arch: Architecture, stored: Mapping[str, tuple[Stored, ...]]
) -> dict[str, list[TensorShare]]:
    """The shares of each HF tensor in the parameters, which `stored` has by name."""
    known: dict[Row, list[tuple[int, Correspondence]]] = {}
    shares: dict[str, list[TensorShare]] = {}
    for entry in entries:
        if entry.row not in known:
            blocks = blocks_of(entry.row, arch, 0, 1)
            known[entry.row] = [(block.part, Correspondence.of(block)) for block in blocks]
        for part, block in known[entry.row]:
            share = TensorShare(stored[entry.megatron], block, block.span)
            shares.setdefault(entry.hf[part], []).append(share)
    return shares


def flat_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return values.view(torch.uint8).numpy().data


class _Mover(Protocol):
    def __call__(self, path: Path, offset: int, views: Sequence[memoryview], /) -> None: ...


def _move(mover: _Mover, stored: Stored, first: int, values: Tensor) -> None:
    if not values.numel():
        return
    content = flat_bytes(values)
    for path, offset, spans in stored.transfers(first, values.numel()):
        mover(path, offset, [content[begin:end] for begin, end in spans])


def _dense(scratch: Tensor, dtype: torch.dtype, piece: Piece) -> Tensor:
    return scratch[: piece.elements * dtype.itemsize].view(dtype)


def _strided(values: Tensor, piece: Piece) -> Tensor:
    return values.as_strided(
        piece.sizes, piece.hf_strides, values.storage_offset() + piece.hf_offset
    )
