"""Finds the quantised weights among a checkpoint's stored tensors: each payload with its scales.

Closed world: a payload without scales, scales without a payload, or a pair that does not fit
together is an error that names the tensor and its file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_policy.converters.config_fields.quantisation import FP8, SECTION, Scheme
from megatron_policy.converters.mismatch import list_problems
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.errors import ConversionError

from .dequantising import ByteMatrix, QuantisedTensor
from .safetensors_format import Extent

Inventory = Mapping[Path, Mapping[str, Extent]]
"""The files of a checkpoint, and where each stored tensor lies in its file."""

_FP8_SCALES = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


class _Problem(Exception):
    """Why a payload and its scales do not fit together."""


@dataclass(frozen=True)
class _Stored:
    name: str
    path: Path
    extent: Extent

    def __str__(self) -> str:
        return f"{self.name} in {self.path}"

    def matrix(self, columns: int) -> ByteMatrix:
        """The tensor as a matrix of rows with that many elements."""
        start, dtype, shape = self.extent
        rows = math.prod(shape) // columns if columns else 0
        return ByteMatrix(self.name, self.path, start, rows, columns * dtype.itemsize, dtype)

    def check(self, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> None:
        """_Problem unless the tensor has that shape and one of these dtypes."""
        if self.extent.dtype not in dtypes:
            legal = " or ".join(map(_short, dtypes))
            raise _Problem(f"{self} is {_short(self.extent.dtype)}, and must be {legal}")
        if self.extent.shape != shape:
            raise _Problem(f"{self} has the shape {list(self.extent.shape)}, not {list(shape)}")


def quantised_tensors(inventory: Inventory, scheme: Scheme) -> dict[str, QuantisedTensor]:
    """The quantised weights of a checkpoint, by the names that they have when they are not.

    ConversionError if a payload and its scales do not fit together, and if nothing is quantised.
    """
    stored = {
        name: _Stored(name, path, extent)
        for path, held in inventory.items()
        for name, extent in held.items()
    }
    found: dict[str, QuantisedTensor] = {}
    problems: list[str] = []
    for name in _names(stored, scheme):
        try:
            found[name] = (_fp8 if scheme.method == FP8 else _mxfp4)(name, stored, scheme)
        except _Problem as problem:
            problems.append(str(problem))
    if problems:
        raise ConversionError(
            f"weights quantised to {scheme}, as config.json says, cannot be read:\n"
            f"{list_problems(problems)}\n"
            f"Fetch the checkpoint again, or correct {SECTION} in its config.json."
        )
    if not found:
        raise ConversionError(
            f"config.json says that weights are quantised to {scheme}, but no tensor is; remove "
            f"{SECTION} from it if the checkpoint was dequantised"
        )
    return found


def as_read(
    inventory: Inventory, quantised: Mapping[str, QuantisedTensor]
) -> dict[str, tuple[torch.dtype, Shape]]:
    """Dtype and shape of every tensor as it is read, by name, in the order of the files: of a
    quantised one those of the weight, in place of its payload and scales.
    """
    parts = {
        matrix.name: name
        for name, tensor in quantised.items()
        for matrix in (tensor.payload, tensor.scales)
    }
    return {
        parts.get(name, name): (torch.bfloat16, quantised[parts[name]].shape)
        if name in parts
        else (at.dtype, at.shape)
        for held in inventory.values()
        for name, at in sorted(held.items(), key=lambda item: item[1].start)
    }


def _names(stored: Mapping[str, _Stored], scheme: Scheme) -> Iterator[str]:
    """The names of the weights of which there is a payload or there are scales, once each."""
    names: dict[str, None] = {}
    for name, tensor in stored.items():
        if scheme.method == FP8:
            if name.endswith(_FP8_SCALES):
                names[name.removesuffix(_FP8_SCALES)] = None
            elif tensor.extent.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                names[name] = None
        else:
            for suffix in (_BLOCKS, _SCALES):
                if name.endswith(suffix):
                    names[name.removesuffix(suffix)] = None
    return iter(names)


def _fp8(name: str, stored: Mapping[str, _Stored], scheme: Scheme) -> QuantisedTensor:
    weight, scales = _pair(stored, name, name + _FP8_SCALES)
    shape = weight.extent.shape
    weight.check(shape, (torch.float8_e4m3fn,))
    if len(shape) != 2:
        raise _Problem(f"{weight} has the shape {list(shape)}; only matrices have block scales")
    blocks = tuple(-(-size // each) for size, each in zip(shape, scheme.block, strict=True))
    scales.check(blocks, _SCALE_DTYPES)
    return QuantisedTensor(shape, scheme, weight.matrix(shape[1]), scales.matrix(blocks[1]))


def _mxfp4(name: str, stored: Mapping[str, _Stored], scheme: Scheme) -> QuantisedTensor:
    if name in stored:
        raise _Problem(f"{stored[name]} is stored quantised and plain; only one of them can be")
    blocks, scales = _pair(stored, name + _BLOCKS, name + _SCALES)
    shape, in_block = blocks.extent.shape, scheme.block[1] // 2
    blocks.check(shape, (torch.uint8,))
    if len(shape) != 4 or shape[-1] != in_block:
        raise _Problem(
            f"{blocks} has the shape {list(shape)}, not [experts, rows, blocks, {in_block}]"
        )
    experts, rows, count, _ = shape
    scales.check((experts, rows, count), (torch.uint8,))
    return QuantisedTensor(
        (experts, count * scheme.block[1], rows),
        scheme,
        blocks.matrix(count * in_block),
        scales.matrix(count),
    )


def _pair(stored: Mapping[str, _Stored], payload: str, scales: str) -> tuple[_Stored, _Stored]:
    for has, lacks, what in ((payload, scales, "scales"), (scales, payload, "weights")):
        if lacks not in stored:
            raise _Problem(f"{stored[has]} has no {what}: no file has {lacks}")
    return stored[payload], stored[scales]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
