"""Writes the weights of Hugging Face checkpoint directories: safetensors, and their index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_policy.converters.files.publishing import flush, naming, write_file

from .hf_names import INDEX, SINGLE
from .safetensors_format import Shape, encode


class ShardFile:
    """A safetensors file that is being written: its tensors can come in any order, one by one."""

    def __init__(self, path: Path, inventory: Mapping[str, tuple[torch.dtype, Shape]]) -> None:
        """`inventory` is all tensors that will come."""
        header, extents = encode(inventory)
        self._awaited, self._path = dict(extents), path
        self._file = path.open("wb")
        with naming(path):
            self._file.write(header)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors; OSError names the file."""
        extent = self._awaited.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (extent.dtype, extent.shape), name
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        with naming(self._path):
            self._file.seek(extent.start)
            self._file.write(flat.view(torch.uint8).numpy().data)

    def complete(self) -> None:
        """Wait until the file is on the disk, and close it; all tensors must have come. OSError
        names the file.
        """
        assert not self._awaited, f"never written: {', '.join(self._awaited)}"
        with naming(self._path):
            flush(self._file)
            self._file.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        # On a full disk this fails once more, with what is still buffered.
        with contextlib.suppress(OSError):
            self._file.close()


def write_shard(
    directory: Path,
    filename: str,
    inventory: Mapping[str, tuple[torch.dtype, Shape]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file of `inventory`; its tensors can come in any order, one by one."""
    file = ShardFile(directory / filename, inventory)
    try:
        for name, tensor in tensors:
            file.put(name, tensor)
        file.complete()
    finally:
        file.close()


def index_of(weight_map: Mapping[str, str], total_bytes: int) -> bytes | None:
    """The index of a checkpoint of several files; a single file needs none."""
    if set(weight_map.values()) == {SINGLE}:
        return None
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index if the checkpoint needs one."""
    if (content := index_of(weight_map, total_bytes)) is not None:
        write_file(directory / INDEX, content)
