"""What a vLLM model computes with: digests of all its tensors, packed ones among them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Digests = dict[str, tuple[str, tuple[int, ...], str]]
"""By name: dtype, shape and a digest of the values."""

KERNEL = "as its kernel multiplies"
DEEPEST = 6
LEFT_OUT = ("_parameters", "_buffers", "_modules", "kv_cache", "handler_tensor")
"""Walked elsewhere, or no weights: requests' memory, and the addresses of packed matrices."""


def digest_model(model: nn.Module) -> Digests:
    """Of every parameter, buffer and other tensor that the model's modules, and vLLM's objects that
    these hold, can reach; and of every matrix as its kernel multiplies with it, which finds what
    was packed into memory that no tensor shows.
    """
    found: Digests = {}
    for prefix, module in model.named_modules():
        own = vars(module) | module._parameters | module._buffers
        for name, tensor in _tensors(f"{prefix}.", own, ()):
            found[name] = _digest(tensor)
        if (matrix := _read_kernel(module)) is not None:
            found[f"{prefix} {KERNEL}"] = _digest(matrix)
    return found


def _tensors(path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """All tensors below a value; modules are walked by the caller, and the cache is no weight."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if len(above) > DEEPEST or id(value) in above or isinstance(value, nn.Module):
        return
    for name, below in _parts(value):
        if not any(part in name for part in LEFT_OUT):
            yield from _tensors(f"{path}/{name}", below, (*above, id(value)))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(value))
    elif isinstance(value, partial):
        yield from (("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            yield name, cell.cell_contents
    elif type(value).__module__.startswith("vllm.") and "config" not in type(value).__module__:
        yield from getattr(value, "__dict__", {}).items()


def _read_kernel(module: nn.Module) -> Tensor | None:
    """The matrix of a linear layer or a head: what its kernel makes of every unit vector."""
    if not hasattr(module, "cpu_linear"):
        return None
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(module, name) for name in names if hasattr(module, name))
    units = torch.eye(width, dtype=module.weight.dtype)
    matrix: Tensor = module.cpu_linear(units, module.weight, None)
    return matrix.T.contiguous()


def _digest(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    plain = tensor.detach().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        hashlib.blake2b(data, digest_size=8).hexdigest(),
    )
