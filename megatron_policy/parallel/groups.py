"""The process groups of a rank, for any engine; exchanges of activations within one, and of their
gradients back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """The process groups this rank belongs to; `dp` excludes context parallelism, `dp_cp` includes
    it.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup

    @property
    def last_stage(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)


Pass = Callable[[torch.Tensor], torch.Tensor]


def exchange(x: torch.Tensor, there: Pass, back: Pass) -> torch.Tensor:
    """`there` of an activation, and `back` of its gradient."""
    made: torch.Tensor = _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Pass, back: Pass) -> torch.Tensor:
        ctx.back = back
        made = there(x)
        return x.view_as(x) if made is x else made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """All ranks' parts, one after another along `dim`."""
    own = x.movedim(dim, 0).contiguous()
    whole = own.new_empty(group.size() * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole.movedim(0, dim).contiguous()


def sum_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum over ranks."""
    whole = x.movedim(dim, 0).contiguous()
    own = whole.new_empty(whole.size(0) // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(own, whole, group=group)
    return own.movedim(0, dim).contiguous()


def sum_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def take_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's part, along `dim`, of what every rank has: also of a gradient that all have whole
    because they compute the same.
    """
    length = x.size(dim) // group.size()
    return x.narrow(dim, group.rank() * length, length).contiguous()


def swap(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[C, ...]` with an entry for each rank becomes `[C, ...]` with one from each rank."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received
