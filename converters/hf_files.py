"""Hugging Face checkpoint directories: config, mapped safetensors, exports that appear whole.

Knows no model family, no Megatron-Core and no process group.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from megatron_policy.errors import ConfigError, ConversionError

from .safetensors_format import Extent, Shape, decode, encode

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# How files of weights end, and of what lists them; all others belong to config or tokenizer.
_WEIGHTS = re.compile(r".+\.(safetensors|index\.json|bin|pt|pth|gguf|h5|msgpack|onnx)")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def locate(model: str | Path) -> Path:
    """The checkpoint's directory: `model` itself, or that hub repository, fetched if need be.

    ConfigError when there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(model), allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
        )
    except (OSError, ValueError) as error:
        raise _no_such_model(model, error) from error


def read_config(model: str | Path) -> dict[str, Any]:
    """Every field of the model's HF config, class defaults included.

    Fields that any transformers model has are left out where they stand at their common default.
    ConfigError when there is no such model, or transformers cannot read its config.
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json: it is not a Hugging Face checkpoint")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    try:
        config = AutoConfig.from_pretrained(str(path if path.is_dir() else model)).to_dict()
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        if not path.is_dir():
            raise _no_such_model(model, error) from error
        raise ConfigError(f"{path / 'config.json'} cannot be read: {error}") from error
    common = PretrainedConfig().to_dict()
    common.pop("tie_word_embeddings", None)  # says what the model is, so it always counts
    return {name: v for name, v in config.items() if name not in common or v != common[name]}


def _no_such_model(model: str | Path, error: Exception) -> ConfigError:
    return ConfigError(f"model {str(model)!r} is no directory here, nor on the hub: {error}")


class Part:
    """A mapped tensor, with an element's bytes as last dimension, that counts what is taken."""

    def __init__(self, raw: Tensor, dtype: torch.dtype, reader: HfReader) -> None:
        self._raw = raw
        self._dtype = dtype
        self._reader = reader

    def view(self, shape: Shape) -> Part:
        """The same elements in another shape."""
        return Part(self._raw.view(*shape, self._dtype.itemsize), self._dtype, self._reader)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        taken = self._raw[index]
        self._reader.bytes_read += taken.nbytes
        return _typed(taken, self._dtype)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements whose bytes are the last dimension of `raw`, as a view where torch allows it."""
    if raw.storage_offset() % dtype.itemsize:  # legal in the format, but not as a view in torch
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).squeeze(-1)


class HfReader:
    """The tensors of a checkpoint: each file opened and mapped once, nothing read before its use.

    `shapes` and `dtypes` are by tensor name; `bytes_read` counts what was taken through `part`.
    ConversionError when files are missing, truncated, or do not hold what the index says.
    """

    def __init__(self, model: str | Path) -> None:
        root = locate(model)
        self.bytes_read = 0
        self._mapped: dict[str, Tensor] = {}  # bytes, those of an element as last dimension
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path, placed in _files(root).items():
            extents = _read_header(path)
            if placed:
                _check_index(path, placed, set(extents))
            raw = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            for name, (start, dtype, shape) in extents.items():
                self._mapped[name] = raw[start : extents[name].end].view(*shape, dtype.itemsize)
                self.shapes[name], self.dtypes[name] = shape, dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file if aligned; writing to it leaves the file alone."""
        return _typed(self._mapped[name], self.dtypes[name])

    def part(self, name: str) -> Part:
        """The tensor for `fill_shard` to take its elements from, counted in `bytes_read`."""
        return Part(self._mapped[name], self.dtypes[name], self)

    def check_copies(self, copies: Mapping[str, str], rank: int = 0, size: int = 1) -> None:
        """ConversionError if a tensor that must repeat another one differs from it.

        Compared are those of `copies` (name -> original) that are there; of each, slice `rank` of
        `size`, so that ranks can share the work.
        """
        for name, original in copies.items():
            if name in self.shapes and original in self.shapes:
                rows = self.shapes[name][0]
                mine = (slice(rows * rank // size, rows * (rank + 1) // size),)
                copy, first = self.part(name)[mine], self.part(original)[mine]
                if copy.dtype != first.dtype:  # which torch compares for some pairs only
                    copy, first = copy.double(), first.double()
                if not torch.equal(copy, first):
                    raise ConversionError(
                        f"{name} differs from {original}, but config.json says they are one tensor;"
                        " set tie_word_embeddings to false, or remove the one that is not meant"
                    )

    def close(self) -> None:
        """Forget the files; they stay mapped as long as a tensor of theirs lives."""
        self._mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _files(root: Path) -> dict[Path, set[str]]:
    """The checkpoint's files, each with the tensors its index places there; none without index."""
    if (root / SINGLE).is_file():
        return {root / SINGLE: set()}
    if not (root / INDEX).is_file():
        found = sorted(path.name for path in root.iterdir() if _WEIGHTS.fullmatch(path.name))
        raise ConversionError(
            f"{root} has neither {SINGLE} nor {INDEX}; weights found: {', '.join(found) or 'none'}."
            " Save the model as safetensors first."
        )
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads((root / INDEX).read_text())["weight_map"].items():
            files.setdefault(root / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{root / INDEX} is no index of safetensors: {error!r}") from error
    if absent := sorted(path.name for path in files if not path.is_file()):
        raise ConversionError(f"{root} lacks files that its index names: {', '.join(absent)}")
    return files


def _check_index(path: Path, placed: set[str], held: set[str]) -> None:
    """ConversionError unless the file holds just the tensors that the index places in it."""
    lies = [f"lacks {name}, which the index places there" for name in sorted(placed - held)]
    lies += [f"holds {name}, which the index does not" for name in sorted(held - placed)]
    if lies:
        raise ConversionError(f"{path} " + "; ".join(lies[:20]) + ". Fetch the checkpoint again.")


def _read_header(path: Path) -> dict[str, Extent]:
    try:
        with path.open("rb") as file:
            return decode(file, path.stat().st_size)
    except ValueError as error:
        raise ConversionError(
            f"{path} is truncated or no safetensors file: {error}. Fetch it again."
        ) from error


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
        _flush(file)


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a checkpoint of several files; a single file needs none."""
    if set(weight_map.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
        _write_json(directory / INDEX, index)


def copy_side_files(source: str | Path, directory: Path) -> None:
    """Copy the config, tokenizer and generation settings of the model `source`, byte for byte."""
    for path in sorted(locate(source).iterdir()):
        if path.is_file() and path.name[0] != "." and not _WEIGHTS.fullmatch(path.name):
            _write(directory / path.name, path.read_bytes())


def partial_dir(destination: str | Path) -> Path:
    """Where an export to `destination` is written: beside it, on the same file system."""
    final = Path(destination).expanduser().absolute()
    return final.with_name(f".{final.name}.partial")


def stage(destination: str | Path, overwrite: bool = False) -> Path:
    """Make an empty `partial_dir` and return it; for one rank to call, before any writes.

    ConfigError when `destination` exists and may not be replaced.
    """
    _replaceable(destination, overwrite)
    partial = partial_dir(destination)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, destination: str | Path, overwrite: bool = False) -> None:
    """Give the fully written directory its final name; for one rank to call, after all wrote."""
    final = _replaceable(destination, overwrite)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    _flush_directory(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _flush_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaceable(destination: str | Path, overwrite: bool) -> Path:
    """The absolute destination, if it is free, empty, or a checkpoint that may be replaced."""
    final = Path(destination).expanduser().absolute()
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return final
    if not (final / "config.json").is_file():
        raise ConfigError(f"{final} exists and is no HF checkpoint; choose another path")
    if not overwrite:
        raise ConfigError(f"{final} exists; choose another path or set overwrite=True")
    return final


def _write_json(path: Path, value: object) -> None:
    _write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _flush(file)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
