"""GPU memory exported to another process on the same machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_policy.dtypes import dtype_named

GLOBALS = frozenset(
    {
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch", "device"),
        ("torch._tensor", "Tensor"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    }
)
"""What a pickled handle names besides dtypes: (module, name)."""

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_FIELDS = (
    "type",
    "size",
    "stride",
    "offset",
    "storage_type",
    "dtype",
    "device",
    "handle",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync",
)
"""The arguments of torch's function, in order."""

_CLASSES: dict[str, Any] = {"type": torch.Tensor, "storage_type": torch.storage.TypedStorage}
_BYTES = ("handle", "counter_handle", "event_handle")
_NUMBERS = (
    "offset",
    "device",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "counter_offset",
    "event_sync",
)
_DEVICE = _FIELDS.index("device")


def share(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A function and its arguments that open the tensor in another process on the same GPU.

    Queued device work is finished first. The caller must keep the memory until the other process
    has dropped what it opened. (torch.multiprocessing's CUDA IPC.)
    """
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()
    try:
        function, arguments = reduce_tensor(tensor.detach())
    except RuntimeError as error:
        for variable in _ALLOCATOR_VARIABLES:
            if "expandable_segments:true" in os.environ.get(variable, "").lower():
                raise RuntimeError(
                    f"{error}. {variable} asks for expandable segments, which not every driver "
                    "shares with other processes: remove expandable_segments:True from it"
                ) from error
        raise
    return function, arguments


def encode(arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments from `share` as plain values, for a message."""
    fields: dict[str, Any] = dict(zip(_FIELDS, arguments, strict=True))
    size, dtype = list(fields["size"]), str(fields["dtype"]).removeprefix("torch.")
    fields |= {"size": size, "stride": list(fields["stride"]), "dtype": dtype}
    fields |= {name: None if fields[name] is None else fields[name].hex() for name in _BYTES}
    return {name: value for name, value in fields.items() if name not in _CLASSES}


def decode(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of `encode`. ValueError, TypeError or LookupError for anything else."""
    made: dict[str, Any] = dict(fields) | _CLASSES
    dtype = dtype_named(made["dtype"])
    if made.keys() != set(_FIELDS):
        raise ValueError("these are not the arguments of a tensor on a GPU")
    made |= {"size": torch.Size(made["size"]), "stride": tuple(made["stride"]), "dtype": dtype}
    for name in _NUMBERS:
        if not isinstance(made[name], int):
            raise ValueError(f"{name} of a tensor on a GPU is a number, not {made[name]!r}")
    made |= {name: None if made[name] is None else bytes.fromhex(made[name]) for name in _BYTES}
    return tuple(made[name] for name in _FIELDS)


def rebuild_function() -> Callable[..., Tensor]:
    """The function that `share` returns."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor


def open_tensor(arguments: Sequence[Any]) -> Tensor:
    """The tensor that another process has shared, on this process's GPU: the same GPU by UUID,
    whatever its number in either process.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    own = list(arguments)
    own[_DEVICE] = torch.cuda.current_device()
    tensor: Tensor = rebuild_cuda_tensor(*own)
    return tensor
