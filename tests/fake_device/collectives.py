"""What NCCL would refuse of a collective, and what a rank gets from it if all others do as it does.

torch's fake process group accepts everything and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from tests.fake_device.known import forget, known, learn, tensors_of

_c10d = torch.ops.c10d
_P2P = {_c10d.send.default, _c10d.recv_.default}


class WrongCallError(RuntimeError):
    """A GPU or NCCL would refuse this call, or wait for a copy that nobody asked for."""


class Collectives:
    """Checks and follows the collectives of the rank on `gpu`.

    What a sum or a maximum leaves is what this rank put in: the others count for nothing. Whatever
    else others send is what this rank sends.
    """

    def __init__(self, gpu: torch.device) -> None:
        self.gpu = gpu
        self.counts: dict[str, int] = {}

    def check(self, func: Any, args: tuple[Any, ...], tensors: Iterable[torch.Tensor]) -> None:
        """WrongCallError for what NCCL would refuse."""
        name = func._schema.name.removeprefix("c10d::").strip("_")
        self.counts[name] = self.counts.get(name, 0) + 1
        if func is _c10d.barrier.default:
            return
        for tensor in tensors:
            if tensor.device != self.gpu:
                raise WrongCallError(f"{name}: {_kind(tensor)} is not on {self.gpu}")
            if tensor.is_sparse or (func not in _P2P and not tensor.is_contiguous()):
                raise WrongCallError(f"{name}: {_kind(tensor)} is not dense and contiguous")
        if func in _CHECKS:
            _CHECKS[func](name, _group(args).size(), args)

    def follow(self, func: Any, args: tuple[Any, ...]) -> None:
        """Find out what this rank has after the collective."""
        if func in _FOLLOWED:
            _FOLLOWED[func](args)
        elif func not in _UNCHANGED:
            for tensor in tensors_of(args[:1]):
                forget(tensor)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def _gather_values(args: tuple[Any, ...]) -> None:
    own = known(args[1])
    if own is None:
        forget(args[0])
    else:
        learn(args[0], own.flatten().repeat(_group(args).size()).view(args[0].shape))


def _list_values(args: tuple[Any, ...]) -> None:
    own = known(args[1][0])
    for tensor in args[0][0]:
        if own is None:
            forget(tensor)
        else:
            learn(tensor, own.clone())


def _scatter_values(args: tuple[Any, ...]) -> None:
    whole, group = known(args[1]), _group(args)
    if whole is None:
        forget(args[0])
    else:
        learn(
            args[0], whole.flatten().chunk(group.size())[group.rank()].view(args[0].shape).clone()
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"a tensor {tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _gathered(name: str, size: int, args: tuple[Any, ...]) -> None:
    _pieces(name, size, args[0], args[1])


def _scattered(name: str, size: int, args: tuple[Any, ...]) -> None:
    _pieces(name, size, args[1], args[0])


def _pieces(name: str, size: int, whole: torch.Tensor, piece: torch.Tensor) -> None:
    if whole.dtype != piece.dtype or whole.numel() != size * piece.numel():
        raise WrongCallError(f"{name}: {_kind(whole)} is not {size} times {_kind(piece)}")


def _all_alike(name: str, size: int, args: tuple[Any, ...]) -> None:
    outputs, (own,) = args[0][0], args[1]
    if len(outputs) != size or any(x.dtype != own.dtype or x.shape != own.shape for x in outputs):
        raise WrongCallError(f"{name}: {len(outputs)} outputs for {size} ranks' {_kind(own)}")


def _exchanged(name: str, size: int, args: tuple[Any, ...]) -> None:
    output, given, _, *splits = args
    for tensor, own in zip((output, given), splits, strict=False):
        rows = tensor.size(0) if tensor.ndim else 0
        fits = sum(own) == rows and len(own) == size if own else rows % size == 0
        if not fits:
            raise WrongCallError(f"{name}: {_kind(tensor)} is split {own or 'evenly'} over {size}")
    if output.dtype != given.dtype or output.shape[1:] != given.shape[1:]:
        raise WrongCallError(f"{name}: {_kind(given)} does not fit into {_kind(output)}")


def _from_root(name: str, size: int, args: tuple[Any, ...]) -> None:
    if not 0 <= args[2] < size:
        raise WrongCallError(f"{name}: rank {args[2]} of {size} is its root")


_CHECKS: dict[Any, Callable[[str, int, tuple[Any, ...]], None]] = {
    _c10d._allgather_base_.default: _gathered,
    _c10d._reduce_scatter_base_.default: _scattered,
    _c10d.allgather_.default: _all_alike,
    _c10d.alltoall_base_.default: _exchanged,
    _c10d.broadcast_.default: _from_root,
}
_FOLLOWED: dict[Any, Callable[[tuple[Any, ...]], None]] = {
    _c10d._allgather_base_.default: _gather_values,
    _c10d.allgather_.default: _list_values,
    _c10d._reduce_scatter_base_.default: _scatter_values,
}
_UNCHANGED = {
    _c10d.allreduce_.default,
    _c10d.barrier.default,
    _c10d.broadcast_.default,
    _c10d.send.default,
}
