"""The dtypes of tensors by name: what a name in a file or a message can mean."""

from __future__ import annotations

import torch


def name_dtype(dtype: torch.dtype) -> str:
    """The dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def holds_integers(dtype: torch.dtype) -> bool:
    """Whether this is an integer dtype (bool is not)."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


_NAMED = {
    name_dtype(dtype): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    )
}
_NAMED |= {"half": torch.float16, "float": torch.float32, "double": torch.float64}


def dtype_named(name: object) -> torch.dtype:
    """The dtype of that name, such as "bfloat16"; ValueError for anything else. A name from outside
    is never looked up among the attributes of torch.
    """
    found = _NAMED.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{name!r:.80} is not the name of a dtype of tensors")
    return found
