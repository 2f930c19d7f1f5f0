"""What makes the host wait for a GPU: values that it asks for, shapes that depend on them, copies
that are not queued, and copies from host memory that is not pinned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_aten = torch.ops.aten
TO_PYTHON = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
SHAPED_BY_VALUES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten._unique2.default,
    _aten.bincount.default,
}
_READ = {_aten.index.Tensor}
_WRITE = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_MASKS = (torch.bool, torch.uint8)
_PACKAGES = ("megatron_policy", "megatron", "tests")


class Waits:
    """Where the host would have waited, while it watches."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note waits within this context."""
        _watching.append(self)
        try:
            yield
        finally:
            _watching.remove(self)


_watching: list[Waits] = []


def look(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Note the place of an operation if it waits."""
    if _watching and waits(func, args, kwargs):
        waited()


def waited(*_: Any) -> None:
    """Note that the host waits here."""
    for each in _watching:
        each.found.add(place_of(sys._getframe(1)))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as what `pin_memory` returns."""
    found = tensor.clone()
    found.is_pinned_here = True  # type: ignore[attr-defined]
    return found


def waits(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func in TO_PYTHON:
        return True
    if func in SHAPED_BY_VALUES:
        return kwargs.get("output_size") is None
    if func in _READ:
        return _has_mask(args[1])
    if func in _WRITE:
        # torch fills a mask with one value without looking at the mask.
        return _has_mask(args[1]) and args[2].numel() != 1
    return func in _COPIES and _copies_waiting(func, args, kwargs)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(each is not None and each.dtype in _MASKS for each in indices)


def _copies_waiting(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    source = args[1] if func is _aten.copy_.default else args[0]
    if func is _aten.copy_.default:
        there, queued = args[0].device, len(args) > 2 and bool(args[2])
    else:
        there, queued = kwargs.get("device") or source.device, bool(kwargs.get("non_blocking"))
    if torch.device(there).type == source.device.type:
        return False
    return not queued or (source.device.type == "cpu" and not hasattr(source, "is_pinned_here"))


def place_of(frame: FrameType | None) -> str:
    """The innermost function of these packages that called."""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        own = [i for i, part in enumerate(parts) if part in _PACKAGES]
        if own and "fake_device" not in parts:
            return f"{'/'.join(parts[own[-1] :])} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
