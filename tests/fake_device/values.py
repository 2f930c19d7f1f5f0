"""A dispatch mode over a FakeTensorMode. It refuses what a GPU would refuse or would have to wait
for, and knows the values that shapes depend on.

Tensors on the CPU are real. Those on the GPU are fake and have no values, but packing, routing and
dispatching tokens make shapes of some. So one that is computed from known ones alone (indices,
masks, lengths, counts) has a twin on the CPU, on which every operation is done too. What routers
choose depends on weights, which nobody knows: tokens take experts in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_device.collectives import Collectives, WrongCallError
from tests.fake_device.known import forget, known, learn, tensors_of
from tests.fake_device.waits import SHAPED_BY_VALUES, TO_PYTHON, Waits, look

_aten = torch.ops.aten
_MOST_INTEGERS, _MOST_FLOATS = 2**23, 2**16
"""Elements of the largest twins."""
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_BLIND = {
    _aten.full_like.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}
"""What they make does not depend on values, only on shape or dtype of their argument."""
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
_OVERWRITE = {
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
}


class UnknownValueError(RuntimeError):
    """A shape or a branch depends on values that are not known here."""


class DeviceRules(TorchDispatchMode):
    """To be entered within a FakeTensorMode. `gpu` is this rank's device."""

    def __init__(self, fake: FakeTensorMode, gpu: torch.device) -> None:
        super().__init__()
        self._fake = fake
        self.collectives = Collectives(gpu)
        self.waits = Waits()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        given = list(tensors_of((args, tuple(kwargs.values()))))
        if func.namespace == "c10d":
            self.collectives.check(func, args, tensors_of(args))
            result = func(*args, **kwargs)
            with torch._C._DisableTorchDispatch():
                self.collectives.follow(func, args)
            return result
        if _is_on_cpu(given, kwargs):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        look(func, args, kwargs)
        if func in TO_PYTHON:
            return _on_twins(func, args, kwargs)
        if func in SHAPED_BY_VALUES:
            return self._like(_on_twins(func, args, kwargs), args[0].device)
        if func in _INDEXED:
            _check_indices(func, args)
            args = (args[0], self._numbered(args[1]), *args[2:])
        found = func(*args, **kwargs)
        if func not in _EMPTY:
            return _followed(func, args, kwargs, given, found)
        return found

    def _numbered(self, indices: Sequence[Any]) -> list[Any]:
        """The indices with every mask as the numbers of its elements."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                parts = _on_twins(_aten.nonzero_numpy.default, (index,), {})
                found += self._like(parts, index.device)
        return found

    def _like(self, twins: Any, device: torch.device) -> Any:
        """Fake tensors on `device` with these twins."""
        if isinstance(twins, list | tuple):
            return [self._like(each, device) for each in twins]
        with self._fake:
            fake = torch.empty(twins.shape, dtype=twins.dtype, device=device)
        learn(fake, twins)
        return fake


def _is_on_cpu(given: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is one between real tensors, or makes one."""
    device = kwargs.get("device")
    return (device is None or torch.device(device).type == "cpu") and not any(
        isinstance(each, FakeTensor) for each in given
    )


def _followed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor], found: Any
) -> Any:
    """What an operation has returned, with the values of that and of what it has changed."""
    written = _written(func, args, kwargs)
    made = list(tensors_of(found))
    if written and func in _OVERWRITE and known(args[0]) is None:
        _overwrite(args[0], args[1] if len(args) > 1 else 0)
    elif any(map(_is_large, made)):
        for each in written:
            forget(each)
    elif func in _BLIND:
        with torch._C._DisableTorchDispatch():
            blind = torch.empty(1, dtype=args[0].dtype).expand(args[0].shape)
        learn(found, _on_twins(func, (blind, *args[1:]), kwargs))
    elif any(known(each) is None for each in given):
        for each in written:
            forget(each)
        if func is _aten.topk.default:
            _choose_in_turn(args, kwargs, found[1])
    else:
        twins = _on_twins(func, args, kwargs)
        if not written and kwargs.get("device") is not None and made[0].device.type == "cpu":
            return twins  # back on the CPU
        for fake, twin in zip(made, tensors_of(twins), strict=True):
            if isinstance(fake, FakeTensor) and fake is not twin:
                learn(fake, twin)
    return args[0] if written and found is not args[0] and len(made) == 1 else found


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() > (_MOST_FLOATS if tensor.is_floating_point() else _MOST_INTEGERS)


def _on_twins(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operation on known values."""
    named = {key: _twin_in(value, func) for key, value in kwargs.items()}
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    with torch._C._DisableTorchDispatch():
        return func(*_twin_in(args, func), **named)


def _twin_in(value: Any, func: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_twin_in(each, func) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    twin = known(value)
    if twin is None:
        kind = f"{value.dtype} {list(value.shape)} on {value.device}"
        raise UnknownValueError(f"{func} depends on the values of {kind}, which are not known")
    return twin


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


def _overwrite(tensor: torch.Tensor, source: Any) -> None:
    """Learn the values of a tensor that is written as a whole, if those of `source` are known."""
    value = known(source) if isinstance(source, torch.Tensor) else source
    if value is None or _is_large(tensor) or not isinstance(tensor, FakeTensor):
        return
    with torch._C._DisableTorchDispatch():
        twin = torch.empty(tensor.shape, dtype=tensor.dtype)
        twin.copy_(value) if isinstance(value, torch.Tensor) else twin.fill_(value)
    learn(tensor, twin)


def _check_indices(func: Any, args: tuple[Any, ...]) -> None:
    """torch accepts indices on the CPU: it copies them, and waits for the copy."""
    for index in args[1]:
        if index is not None and index.device != args[0].device:
            kind = f"{index.dtype} {list(index.shape)} on {index.device}"
            raise WrongCallError(f"{func}: the index {kind} into a tensor on {args[0].device}")


def _choose_in_turn(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], indices: torch.Tensor
) -> None:
    """The largest of unknown values: each row takes the entries after those of the one before."""
    entries = args[0].size(args[2] if len(args) > 2 else kwargs.get("dim", -1))
    with torch._C._DisableTorchDispatch():
        learn(indices, torch.arange(indices.numel()).reshape(indices.shape) % entries)
