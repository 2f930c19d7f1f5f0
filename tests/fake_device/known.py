"""Values of fake tensors that are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, on the CPU; None if they are not known."""
    twin = getattr(tensor, "_twin", None) if isinstance(tensor, FakeTensor) else tensor
    if twin is None or twin.shape != tensor.shape or twin.dtype != tensor.dtype:
        return None
    return None if hasattr(twin.untyped_storage(), "forgotten") else twin


def learn(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    assert twin.shape == tensor.shape and twin.dtype == tensor.dtype, (twin, tensor)
    tensor._twin = twin  # type: ignore[attr-defined]


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written into this tensor, and so into all views of its values."""
    twin = getattr(tensor, "_twin", None) if isinstance(tensor, FakeTensor) else tensor
    if twin is not None:
        twin.untyped_storage().forgotten = True


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
