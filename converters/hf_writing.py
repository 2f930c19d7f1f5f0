"""Hugging Face checkpoint directories, written: safetensors, their index, and what else is copied.

Knows no model family, no Megatron-Core and no process group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .hf_files import INDEX, SINGLE, locate, side_files
from .publishing import flush, write_file
from .safetensors_format import Shape, encode


def write_shard(
    directory: Path,
    filename: str,
    inventory: Mapping[str, tuple[torch.dtype, Shape]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file of `inventory`; its tensors may come in any order, one by one."""
    header, extents = encode(inventory)
    awaited = dict(extents)
    with (directory / filename).open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            extent = awaited.pop(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (extent.dtype, extent.shape), name
            file.seek(extent.start)
            flat = tensor.detach().contiguous().cpu().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        assert not awaited, f"never came: {', '.join(awaited)}"
        flush(file)


def index_of(weight_map: Mapping[str, str], total_bytes: int) -> bytes | None:
    """The index of a checkpoint of several files; a single file needs none."""
    if set(weight_map.values()) == {SINGLE}:
        return None
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index, where the checkpoint needs one."""
    if (content := index_of(weight_map, total_bytes)) is not None:
        write_file(directory / INDEX, content)


def copy_side_files(source: str | Path, directory: Path) -> None:
    """Copy the config, tokenizer and generation settings of the model `source`, byte for byte."""
    for path in side_files(locate(source)):
        write_file(directory / path.name, path.read_bytes())
