"""What a conversion will do, as values and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_policy.convert.open_checkpoint import HF, MCORE
from megatron_policy.converters.config_fields.quantisation import SECTION
from megatron_policy.estimate.sizes import show_size

SHOWN_NAMES = 3
"""Names shown of a list that can have any length."""


@dataclass(frozen=True)
class PlannedTensor:
    """One HF tensor, the dtype in which it is written, and its keys in Megatron-Core."""

    name: str
    shape: tuple[int, ...]
    source_dtype: torch.dtype
    dtype: torch.dtype
    keys: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """As it is written."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The module it belongs to, of all layers and experts together: `model.layers.*.mlp`."""
        parts = ["*" if part.isdigit() else part for part in self.name.split(".")]
        if "*" not in parts:
            return self.name
        if parts[-1] in ("weight", "bias"):
            parts.pop()
        return ".".join(parts[:-1] if parts[-2] != "*" else parts)


@dataclass(frozen=True)
class TensorKind:
    """The tensors of one kind: how many, their bytes and their dtypes as they are written."""

    name: str
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class ConversionPlan:
    """What is read, written and cast. Sizes are in bytes; `files` have their sizes."""

    source: Path
    destination: Path
    to: str
    family: str
    tensors: tuple[PlannedTensor, ...]
    dropped: tuple[str, ...]
    """HF tensors of the source that feed nothing."""
    files: tuple[tuple[str, int], ...]
    side_files: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    buffer_bytes: int
    has_digests: bool
    """Whether the source has digests of its bytes."""
    dequantised: str = ""
    """How many tensors are read as bfloat16 and how they are stored, in words; "" if none is."""
    adapters: str = ""
    """What the adapters that are converted or merged are, in words; "" for whole models."""
    resumed_with: str = ""
    """The keys of `megatron_cfg.peft` with which a policy resumes from what is written."""

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        """What is written, by kind, in the order of the first tensor of each."""
        found: dict[str, list[PlannedTensor]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.kind, []).append(tensor)
        return tuple(
            TensorKind(
                name,
                len(of),
                sum(each.nbytes for each in of),
                tuple(dict.fromkeys(short(each.dtype) for each in of)),
            )
            for name, of in found.items()
        )

    def describe(self, tensors: bool = True) -> Iterator[str]:
        """The plan as lines of text: a summary, then, if `tensors`, every file and tensor."""
        formats = {HF: "Hugging Face", MCORE: "Megatron-Core (torch_dist)"}
        yield f"{self.family}: {self.source} -> {self.destination} ({formats[self.to]})"
        if self.adapters:
            yield self.adapters
        yield f"reads {len(self.tensors)} tensors, {show_size(self.bytes_read)}; " + (
            "compares them with the source's digests"
            if self.has_digests
            else "the source has no digests to compare them with"
        )
        yield from _files(self.bytes_written, self.files)
        yield f"{len(self.side_files)} other files: {_some(self.side_files) or 'none'}"
        yield f"{self._cast()}; uses a buffer of {show_size(self.buffer_bytes)}"
        if self.dequantised:
            yield f"dequantises {self.dequantised}; config.json loses its {SECTION}"
        if self.dropped:
            yield f"leaves out {len(self.dropped)} tensors: {_some(self.dropped)}"
        yield from self._table()
        if tensors:
            yield from self._list()

    def _cast(self) -> str:
        casts = [(short(t.source_dtype), short(t.dtype)) for t in self.tensors]
        kinds = dict.fromkeys(f"{old} to {new}" for old, new in casts if old != new)
        count = sum(old != new for old, new in casts)
        return f"casts {count} tensors from {', '.join(kinds)}" if kinds else "casts no tensor"

    def _table(self) -> Iterator[str]:
        kinds = self.kinds
        width = max(len(kind.name) for kind in kinds)
        yield f"{'what is written':{width + 2}}  tensors     size  dtype"
        for kind in kinds:
            size, dtypes = show_size(kind.nbytes), ", ".join(kind.dtypes)
            yield f"  {kind.name:{width}}  {kind.tensors:7}  {size:>7}  {dtypes}"

    def _list(self) -> Iterator[str]:
        for file, size in self.files:
            yield f"file {file}: {size:,} bytes"
        for tensor in self.tensors:
            to = "" if tensor.dtype == tensor.source_dtype else f" -> {short(tensor.dtype)}"
            keys = f": {', '.join(tensor.keys)}" if tensor.keys else ""
            yield f"{tensor.name} {list(tensor.shape)} {short(tensor.source_dtype)}{to}{keys}"


def short(dtype: torch.dtype) -> str:
    """The dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def _files(written: int, files: Sequence[tuple[str, int]]) -> Iterator[str]:
    first, last = files[0][0], files[-1][0]
    if len(files) == 1:
        yield f"writes {show_size(written)}, tensors in {first}"
        return
    largest = show_size(max(size for _, size in files))
    yield f"writes {show_size(written)}, tensors in {len(files)} files of at most {largest}"
    yield f"  {first} to {last}"


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
