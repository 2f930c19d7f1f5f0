"""The engine's end of both transports through memory shared with a trainer on the same machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import align
from megatron_policy.refit.manifest import RefitInfo, RefitManifest
from megatron_policy.refit.receive.assembler import WeightAssembler
from megatron_policy.refit.transports.ipc import protocol
from megatron_policy.refit.transports.ipc.shared_memory import open_exported, read_handle
from megatron_policy.refit.transports.ipc.sockets.link import remove_if_dead
from megatron_policy.refit.transports.ipc.sockets.request_reply import ReplySocket

_LINGER_S = 2.0  # to flush the last reply

_DIFFERENT_MODELS = "trainer and engine have different models"

_Places = Mapping[str, tuple[tuple[int, ...], int]]
"""Where tensors are in flat memory: shape, and offset in elements."""


def receive_stream(assembler: WeightAssembler, address: str, timeout_s: float) -> RefitManifest:
    """Receive one refit from the trainer that listens at the address; see `Receiver`."""
    try:
        while (accepted := _converse(assembler, address, timeout_s)) is None:
            pass  # the trainer has only asked
        return accepted
    except BaseException:
        remove_if_dead(address)
        raise


def _converse(assembler: WeightAssembler, address: str, timeout_s: float) -> RefitManifest | None:
    """Reply to a trainer until its refit ends, or to its question alone."""
    line, accepted = ReplySocket(address, "trainer", timeout_s), None
    try:
        while accepted is None:
            content = line.receive()
            try:
                request = protocol.parse_request(content)
                if isinstance(request, protocol.Question):
                    line.send(protocol.encode_version(assembler.version))
                    return None
                accepted = carry_out(request, assembler)
            except Exception as error:
                line.send(protocol.encode_refusal(error))
                raise
            line.send(protocol.ACK)
        return accepted
    finally:
        line.close(min(timeout_s, _LINGER_S))


def carry_out(
    request: protocol.PackMessage | RefitInfo | RefitManifest | protocol.Question,
    assembler: WeightAssembler,
) -> RefitManifest | None:
    """Carry out a request of the stream; return the manifest if it was the last."""
    match request:
        case RefitManifest():
            return assembler.finish(request)
        case RefitInfo():
            assembler.announce(request)
        case protocol.Question():
            raise assembler.refusal("this engine cannot say which weights it has: send whole ones")
        case pack:
            open_exported(pack.handle, lambda at: assembler.take([*_unpack(assembler, pack, at)]))
    return None


def _unpack(
    assembler: WeightAssembler, pack: protocol.PackMessage, memory: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a pack, as views of `memory`."""
    offset = 0
    for name in pack.names:
        shape, dtype = assembler.form(name)
        size = math.prod(shape) * dtype.itemsize
        if offset + size > memory.numel():
            raise RefitError(f"{name} does not fit in what the trainer sent: {_DIFFERENT_MODELS}")
        yield name, memory[offset : offset + size].view(dtype).view(shape)
        offset += align(size)
    if offset != pack.used_bytes:
        raise RefitError(
            f"a pack of {pack.used_bytes} bytes should have {offset} by the shapes that the engine "
            f"expects: {_DIFFERENT_MODELS}"
        )


def receive_handles(
    unfinished: WeightAssembler | None,
    begin: Callable[[], WeightAssembler],
    handles: Mapping[str, Any],
    device_id: str | None,
) -> WeightAssembler:
    """Take some weights of a refit; return the unfinished assembler. See `Receiver`.

    The protocol does not mark the start of a refit: a new one begins when the first tensor of the
    unfinished one comes again.
    """
    if not isinstance(handles, Mapping):
        raise RefitError(f"handles are {handles!r:.80}: give what IpcHandles.weights has returned")
    wanted = device_id or device.device_id()
    if device_id is None and len(handles) == 1 and not device.is_accelerated():
        wanted = next(iter(handles))
    if wanted not in handles:
        raise RefitError(
            f"the trainer sent weights for {', '.join(sorted(handles))}, none for {wanted}. "
            "Trainer and engine must use the same device; or choose one with `device_id`"
        )
    try:
        packed, rebuilds, offsets = handles[wanted]
        rebuilds, offsets = dict(rebuilds), dict(offsets)
    except (TypeError, ValueError) as error:
        raise RefitError(
            "handles of weights must be (True, [(dtype, handle), ...], {name: offset})"
        ) from error
    if not packed:
        raise RefitError("handles of single tensors are not supported, only packed ones")
    first = next(iter(unfinished.arrived), None) if unfinished else None
    assembler = begin() if unfinished is None or first in offsets else unfinished
    forms = {name: assembler.form(name) for name in offsets}
    if unclaimed := {form[1] for form in forms.values()} - rebuilds.keys():
        raise RefitError(f"the trainer sent no tensor of {unclaimed}: {_DIFFERENT_MODELS}")
    for dtype, rebuild in rebuilds.items():
        mine = {name: (shape, offsets[name]) for name, (shape, d) in forms.items() if d == dtype}
        open_exported(read_handle(rebuild), functools.partial(_take_flat, assembler, dtype, mine))
    return assembler


def _take_flat(
    assembler: WeightAssembler, dtype: torch.dtype, where: _Places, memory: Tensor
) -> None:
    flat = memory.reshape(-1).view(dtype)
    taken = []
    for name, (shape, offset) in where.items():
        if not 0 <= offset <= flat.numel() - math.prod(shape):
            raise RefitError(f"{name} does not fit in what the trainer sent: {_DIFFERENT_MODELS}")
        taken.append((name, flat[offset : offset + math.prod(shape)].view(shape)))
    assembler.take(taken)
