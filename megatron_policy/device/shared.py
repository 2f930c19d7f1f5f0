"""Memory of a GPU, lent to another process on the same machine; knows nothing of what is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
"""What a pickled handle names, beside dtypes: (module, name)."""

_DEVICE = 6  # which argument of torch's function is the number of the GPU


def share(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A function and its arguments, which in another process give that tensor on the same GPU.

    What was queued for it is done first. Its memory stays the caller's, to keep until the other
    process has dropped what it opened. (torch.multiprocessing's CUDA IPC.)
    """
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize()
    function, arguments = reduce_tensor(tensor.detach())
    return function, arguments


def opened(arguments: Sequence[Any]) -> Tensor:
    """The tensor that another process has shared, on this process's GPU: by their UUID the same
    one, whatever its number in either.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    own = list(arguments)
    own[_DEVICE] = torch.cuda.current_device()
    tensor: Tensor = rebuild_cuda_tensor(*own)
    return tensor
