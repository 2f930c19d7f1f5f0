"""Reads Hugging Face checkpoint directories: which files there are, and their tensors, mapped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.contained import expanded, inside, open_regular, read
from megatron_policy.converters.rows.blocks import Copying
from megatron_policy.errors import ConversionError

from .dequantising import ByteMatrix, QuantisedTensor
from .hf_config import read_config as read_config
from .hf_config import scheme_in
from .hf_location import locate as locate
from .hf_names import ADAPTER_CONFIG, ADAPTER_MODEL, INDEX, SINGLE, holds_weights
from .quantised import Inventory, as_read, quantised_tensors
from .safetensors_format import Extent, Shape, UnreadDtype, decode

MAX_INDEX_BYTES = 100_000_000
"""Also the limit for the header of a safetensors file."""


class MappedTensor:
    """A mapped tensor, with an element's bytes as last dimension, that counts the bytes taken."""

    def __init__(self, raw: Tensor, dtype: torch.dtype, reader: HfReader) -> None:
        self._raw = raw
        self._dtype = dtype
        self._reader = reader

    def view(self, shape: Shape) -> MappedTensor:
        """The same elements in another shape."""
        return MappedTensor(self._raw.view(*shape, self._dtype.itemsize), self._dtype, self._reader)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        taken = self._raw[index]
        self._reader.bytes_read += taken.nbytes
        return _typed(taken, self._dtype)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements whose bytes are the last dimension of `raw`; a view where torch allows it."""
    if raw.storage_offset() % dtype.itemsize:  # legal in the format, but torch cannot make a view
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).squeeze(-1)


class DequantisedTensor(Copying):
    """A quantised tensor of mapped files in a `shape`; its elements are bfloat16 when taken."""

    def __init__(self, tensor: QuantisedTensor, shape: Shape, reader: HfReader) -> None:
        self._tensor, self._shape, self._reader = tensor, shape, reader

    def view(self, shape: Shape) -> DequantisedTensor:
        """The same elements in another shape."""
        return DequantisedTensor(self._tensor, shape, self._reader)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._tensor.take(self._shape, index, self._reader.fetch)

    def copy_to(self, out: Tensor, index: tuple[slice, ...]) -> None:
        """Copy the elements at `index` to `out` without memory for all of them."""
        self._tensor.copy_to(out, self._shape, index, self._reader.fetch)


class HfReader:
    """The tensors of a checkpoint: each file is opened and mapped once, and read only on use.

    `shapes` and `dtypes` are by tensor name; `bytes_read` counts what was taken through `part`.
    Weights that config.json says are quantised have their plain names, and are bfloat16.
    ConversionError when files are missing, truncated, or contradict the index or config.json.
    """

    def __init__(self, model: str | Path, single: str = SINGLE) -> None:
        """`single` is the name of the file with all tensors, if there is no index."""
        root = locate(model)
        self.bytes_read = 0
        self._mapped: dict[str, Tensor] = {}  # bytes, with those of an element as last dimension
        self._raw: dict[Path, Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        files = inventory(root, single)
        self._quantised = quantised_in(root, files) if single == SINGLE else {}
        for path, extents in files.items():
            raw = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            self._raw[path] = raw
            for name, (start, dtype, shape) in extents.items():
                self._mapped[name] = raw[start : extents[name].end].view(*shape, dtype.itemsize)
        for name, (dtype, shape) in as_read(files, self._quantised).items():
            self.shapes[name], self.dtypes[name] = shape, dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file if aligned; writing to it leaves the file
        unchanged. One that is stored quantised is in new memory.
        """
        if name in self._quantised:
            return self.part(name)[(slice(None),)]
        return _typed(self._mapped[name], self.dtypes[name])

    def part(self, name: str) -> MappedTensor | DequantisedTensor:
        """The tensor for `fill_shard` to take elements from, counted in `bytes_read`."""
        if name in self._quantised:
            return DequantisedTensor(self._quantised[name], self.shapes[name], self)
        return MappedTensor(self._mapped[name], self.dtypes[name], self)

    def fetch(self, matrix: ByteMatrix, rows: range, columns: range) -> Tensor:
        """Bytes of a stored matrix as a view of its file, counted in `bytes_read`."""
        stored = self._raw[matrix.path][matrix.start : matrix.start + matrix.nbytes]
        found = stored.view(matrix.rows, matrix.width)[
            rows.start : rows.stop : rows.step, columns.start : columns.stop
        ]
        self.bytes_read += found.nbytes
        return found

    def check_copies(self, copies: Mapping[str, str], rank: int = 0, size: int = 1) -> None:
        """Raise ConversionError if a tied copy differs from its original.

        Compares those of `copies` (name -> original) that are present; of each only slice `rank` of
        `size`, so that ranks can share the work.
        """
        for name, original in copies.items():
            if name in self.shapes and original in self.shapes:
                rows = self.shapes[name][0]
                mine = (slice(rows * rank // size, rows * (rank + 1) // size),)
                copy, first = self.part(name)[mine], self.part(original)[mine]
                if copy.dtype != first.dtype:  # torch compares only some pairs of dtypes
                    copy, first = copy.double(), first.double()
                if not torch.equal(copy, first):
                    raise ConversionError(copy_differs(name, original))

    def close(self) -> None:
        """Release the files; they stay mapped as long as one of their tensors is alive."""
        self._mapped.clear()
        self._raw.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def copy_differs(name: str, original: str) -> str:
    """The message for a copy that differs from its original: in a tied model, or in a layer for
    multi-token prediction.
    """
    if ".layers." in name:
        return (
            f"{name} differs from {original}, but the layer for multi-token prediction shares it "
            "with the model; set policy.megatron_cfg.mtp_num_layers to 0, which leaves such layers "
            "out, or delete the tensor"
        )
    return (
        f"{name} differs from {original}, but config.json says they are one tensor; set "
        "tie_word_embeddings to false, or delete the tensor you do not want"
    )


def inventory(root: Path, single: str = SINGLE) -> dict[Path, dict[str, Extent]]:
    """The files that hold a checkpoint's tensors, and where each tensor lies in its file.

    ConversionError when files are missing, truncated, or contradict the index, and for a model that
    has adapters beside it.
    """
    placed = _files(root, single)
    if single == SINGLE and (root / ADAPTER_CONFIG).exists():
        there = (root / ADAPTER_MODEL).exists()
        moved = f"move it with {ADAPTER_MODEL}" if there else "put it with the adapters' weights"
        raise ConversionError(
            f"{root} has {ADAPTER_CONFIG} beside whole weights, and transformers adds the adapters "
            f"that it describes to them. Remove {ADAPTER_CONFIG} if the weights are whole without "
            f"(merged already, say); otherwise {moved} into a directory of its own, and merge "
            f"that: megatron-policy convert ADAPTERS OUT --to hf --merge --base {root}"
        )
    files = {path: _read_header(path) for path in placed}
    held = {name for each in files.values() for name in each}
    if nowhere := sorted(name for names in placed.values() for name in names - held):
        raise ConversionError(
            f"{root / INDEX} names tensors that no file has: {', '.join(nowhere[:20])}. If the "
            "model shares them with others, as it shares a tied head with the embedding, take "
            "their names out of the index; otherwise files and index are of different checkpoints: "
            "fetch it again"
        )
    for path, names in placed.items():
        own = files[path].keys() if names else names  # without an index none is placed
        lies = [f"lacks {name}, which the index places there" for name in sorted(names - own)]
        lies += [f"holds {name}, which the index does not" for name in sorted(own - names)]
        if lies:
            raise ConversionError(
                f"{path} " + "; ".join(lies[:20]) + ". Fetch the checkpoint again."
            )
    return files


def list_tensors(model: str | Path, with_shapes: bool = False) -> dict[str, Shape | None]:
    """The names of a checkpoint's tensors, by its index if it has one, of which nothing is checked;
    none where there is only a config. `with_shapes` those in files that are there have their
    shapes. Of a hub repository only the index is fetched.
    """
    if expanded(model).is_file():
        return {}
    root = locate(model, [INDEX])
    if not has_weights(root):
        return {}
    found: dict[str, Shape | None] = {}
    for path, names in _files(root, SINGLE).items():
        found |= dict.fromkeys(names)
        if not names or (with_shapes and path.is_file()):
            found |= {name: at.shape for name, at in _read_header(path).items()}
    return found


def quantised_in(root: Path, files: Inventory) -> dict[str, QuantisedTensor]:
    """The quantised weights of the checkpoint with these files, by name; none if it has none.

    ConversionError when they are not what config.json says.
    """
    scheme = scheme_in(root)
    return {} if scheme is None else quantised_tensors(files, scheme)


def has_weights(root: Path) -> bool:
    """Whether the directory has a model's tensors as safetensors."""
    return (root / SINGLE).is_file() or (root / INDEX).is_file()


def is_peft(path: str | Path) -> bool:
    """Whether a directory has adapters, and no model."""
    root = expanded(path)
    return (root / ADAPTER_CONFIG).is_file() and not has_weights(root)


def _files(root: Path, single: str) -> dict[Path, set[str]]:
    """The checkpoint's files, each with the tensors its index places there; none without index."""
    if (root / single).is_file():
        return {inside(root, single): set()}
    if not (root / INDEX).is_file():
        found = sorted(path.name for path in root.iterdir() if holds_weights(path.name))
        raise ConversionError(
            f"{root} has neither {single} nor {INDEX}; weights found: {', '.join(found) or 'none'}."
            " Save the model as safetensors first."
        )
    files: dict[Path, set[str]] = {}
    try:
        index = strict_json.parse(read(inside(root, INDEX), MAX_INDEX_BYTES))
        for name, file in index["weight_map"].items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"it names {file!r:.200}, which is not a file next to it")
            files.setdefault(root / file, set()).add(name)
    except ConversionError:
        raise
    except OSError as error:
        raise ConversionError(f"{root / INDEX} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{root / INDEX} is not an index of safetensors: {error!r:.2000}"
        ) from error
    if absent := sorted(path.name for path in files if not path.is_file()):
        raise ConversionError(f"{root} lacks files that its index names: {', '.join(absent)}")
    for path in files:
        inside(root, path.name)
    return files


def _read_header(path: Path) -> dict[str, Extent]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return decode(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    except UnreadDtype as error:
        raise ConversionError(
            f"{path} cannot be read: {error}; use a checkpoint whose weights are bfloat16, float16 "
            "or float32"
        ) from error
    except ValueError as error:
        raise ConversionError(
            f"{path} is truncated or not a safetensors file: {error}. Fetch it again."
        ) from error
