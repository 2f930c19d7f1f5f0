"""Memory that a trainer exports to an engine on the same machine: shared memory of the host, or of
the GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_policy import device
from megatron_policy.device import shared as on_gpu
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import Buffer, aligned
from megatron_policy.refit.transports.ipc.shared_memory import (
    DIRECTORY,
    Handle,
    SharedMemory,
    attach,
    create,
    rebuilt,
)

Rebuild = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function and its arguments that open the memory in another process; the seventh argument is
the number of the GPU there."""

GLOBALS = on_gpu.GLOBALS | {
    (Handle.__module__, Handle.__qualname__),
    (rebuilt.__module__, rebuilt.__qualname__),
}
"""What a pickled handle names besides dtypes: (module, name)."""


class ExportedBuffer:
    """A buffer of this process that another process can open."""

    def __init__(self, nbytes: int, where: torch.device, directory: str = DIRECTORY) -> None:
        """Allocate it at once, on `where`. RefitError if there is not enough memory."""
        size = aligned(max(1, nbytes))
        self._host: SharedMemory | None = None
        if where.type == "cpu":
            self._host = create(size, directory)
            self.buffer = Buffer(self._host.tensor())
        else:
            self.buffer = Buffer.on(where, size)

    def handle(self) -> object:
        """A handle for `open_exported`, on a GPU also for the host's receivers; for single use."""
        if self._host is not None:
            return self._host.handle()
        return _shared(self.buffer.memory)[1:]

    def rebuild(self, dtype: torch.dtype) -> Rebuild:
        """The same as flat elements of `dtype`, to be called by the receiver."""
        if self._host is None:
            return _shared(self.buffer.typed(dtype))
        h = self._host.handle()
        return rebuilt, (h.pid, h.started, h.fd, h.inode, h.nbytes, dtype, 0)

    def close(self) -> None:
        """Release it; nobody can open it any more."""
        # The buffer may still be referenced, for instance by the traceback of an error.
        self.buffer.forget()
        if self._host is not None:
            self._host.close()


def _shared(tensor: Tensor) -> Rebuild:
    try:
        return on_gpu.share(tensor)
    except RuntimeError as error:
        raise RefitError(f"the trainer cannot share its GPU memory: {error}") from error


def open_exported(handle: object, consume: Callable[[Tensor], None]) -> None:
    """Call `consume` with the trainer's memory, flat uint8, which is released when it returns.

    RefitError if it cannot be opened, or if a tensor of it is still held afterwards.
    """
    if isinstance(handle, Handle):
        attached = attach(handle)
        try:
            consume(attached.tensor())
        except BaseException as error:
            _forget_locals(error)
            attached.close()
            raise
        if not attached.close():
            raise RefitError(
                "the engine holds on to memory that it was given to load, which the trainer will "
                "overwrite. `load` must copy what it keeps"
            )
        return
    try:
        consume(_opened_on_gpu(handle))
    except BaseException as error:
        _forget_locals(error)
        raise
    finally:
        device.synchronize()  # the trainer overwrites it as soon as it has the reply


def _opened_on_gpu(handle: Any) -> Tensor:
    try:
        return on_gpu.open_tensor(handle[0])
    except (RuntimeError, TypeError, IndexError) as error:
        raise RefitError(
            f"the engine cannot open the trainer's GPU memory: {error}. Both must use the same "
            "GPU of the same machine"
        ) from error


def _forget_locals(error: BaseException | None) -> None:
    """Clear the locals in an error's tracebacks: it may be kept, the trainer's memory must not."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def handle_of(rebuild: Any) -> object:
    """The handle for `open_exported` in a `Rebuild`; RefitError for any other function."""
    try:
        function, arguments = rebuild
        known = (function.__module__, function.__qualname__) in GLOBALS
    except (TypeError, ValueError, AttributeError) as error:
        raise RefitError(f"this is not a handle of weights: {error}") from error
    if not known:
        raise RefitError(f"a handle of weights asks to call {function}, which is refused")
    return Handle(*arguments[:5]) if function is rebuilt else (arguments,)
