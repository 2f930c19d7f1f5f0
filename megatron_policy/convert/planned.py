"""What a conversion will do, as values and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_policy.convert.open_checkpoint import HF, MCORE
from megatron_policy.converters.config_fields.quantisation import SECTION
from megatron_policy.dtypes import name_dtype
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
                tuple(dict.fromkeys(name_dtype(each.dtype) for each in of)),
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
        first, last = self.files[0][0], self.files[-1][0]
        written = f"writes {show_size(self.bytes_written)}, tensors in "
        if len(self.files) == 1:
            yield f"{written}{first}"
        else:
            largest = show_size(max(size for _, size in self.files))
            yield f"{written}{len(self.files)} files of at most {largest}"
            yield f"  {first} to {last}"
        yield f"{len(self.side_files)} other files: {_some(self.side_files) or 'none'}"
        casts = [(name_dtype(t.source_dtype), name_dtype(t.dtype)) for t in self.tensors]
        casts = [(old, new) for old, new in casts if old != new]
        kinds = ", ".join(dict.fromkeys(f"{old} to {new}" for old, new in casts))
        cast = f"casts {len(casts)} tensors from {kinds}" if casts else "casts no tensor"
        yield f"{cast}; uses a buffer of {show_size(self.buffer_bytes)}"
        if self.dequantised:
            yield f"dequantises {self.dequantised}; config.json loses its {SECTION}"
        if self.dropped:
            yield f"leaves out {len(self.dropped)} tensors: {_some(self.dropped)}"
        width = max(len(kind.name) for kind in self.kinds)
        yield f"{'what is written':{width + 2}}  tensors     size  dtype"
        for kind in self.kinds:
            size, dtypes = show_size(kind.nbytes), ", ".join(kind.dtypes)
            yield f"  {kind.name:{width}}  {kind.tensors:7}  {size:>7}  {dtypes}"
        if not tensors:
            return
        for file, nbytes in self.files:
            yield f"file {file}: {nbytes:,} bytes"
        for tensor in self.tensors:
            to = "" if tensor.dtype == tensor.source_dtype else f" -> {name_dtype(tensor.dtype)}"
            keys = f": {', '.join(tensor.keys)}" if tensor.keys else ""
            yield f"{tensor.name} {list(tensor.shape)} {name_dtype(tensor.source_dtype)}{to}{keys}"


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
