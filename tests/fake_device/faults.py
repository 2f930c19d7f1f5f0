"""Faults that only a GPU, or only a large layout, would show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.lm_head import fused
from megatron_policy.packing.tokens import TokenLayout


@contextmanager
def cpu_index() -> Iterator[None]:
    """Tokens are taken by an index that was left on the CPU."""
    on_device = TokenLayout.take

    def take(self: TokenLayout, values_BS: torch.Tensor, rank: int, filler: float = 0) -> Any:
        sources = self.sources_CTR
        object.__setattr__(self, "sources_CTR", sources.cpu())
        try:
            return on_device(self, values_BS, rank, filler)
        finally:
            object.__setattr__(self, "sources_CTR", sources)

    with mock.patch.object(TokenLayout, "take", take):
        yield


@contextmanager
def cpu_all_reduce() -> Iterator[None]:
    """The largest logits of all vocabulary shards are compared on the CPU."""
    combine = fused._combine

    def on_cpu(sums: Any, group: dist.ProcessGroup) -> None:
        dist.all_reduce(sums.peak_N.new_zeros(4, device="cpu"), group=group)
        combine(sums, group)

    with mock.patch.object(fused, "_combine", on_cpu):
        yield


@contextmanager
def wrong_reshape() -> Iterator[None]:
    """Query heads are viewed eight at a time, as if every tensor-parallel rank had so many."""
    forward = TorchAttention.forward

    def grouped(self: Any, query_SBNH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        query_SBNH = query_SBNH.unflatten(2, (-1, 8)).flatten(2, 3)
        return forward(self, query_SBNH, *args, **kwargs)

    with mock.patch.object(TorchAttention, "forward", grouped):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "cpu_index": cpu_index,
    "cpu_all_reduce": cpu_all_reduce,
    "wrong_reshape": wrong_reshape,
}
