"""Faults that only a GPU, or only a large layout, would show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_policy.device import current_device, to_device
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.lm_head import fused
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.tokens import TokenLayout
from megatron_policy.training import losses, step


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


@contextmanager
def device_mask() -> Iterator[None]:
    """The positions of wanted tokens are found on the GPU."""

    def find_wanted(self: Output, wanted_BS: torch.Tensor) -> torch.Tensor:
        wanted_BS, rank = to_device(wanted_BS.long()), self.context_group.rank()
        return self.microbatch.layout.take(wanted_BS, rank).flatten().nonzero()[:, 0]

    with mock.patch.object(Output, "_find_wanted", find_wanted):
        yield


@contextmanager
def pageable_copy() -> Iterator[None]:
    """Token counts are copied from host memory that is not pinned."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(current_device(), non_blocking=True)

    with mock.patch.object(losses, "to_device", copied):
        yield


@contextmanager
def read_value() -> Iterator[None]:
    """The host reads how many tokens are divided by."""
    clamped = losses.evaluate_loss

    def read(loss_fn: Any, output: Any, counts: Any, *args: Any) -> Any:
        assert float(counts.tokens) > 0
        return clamped(loss_fn, output, counts, *args)

    with mock.patch.object(step, "evaluate_loss", read):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "cpu_index": cpu_index,
    "cpu_all_reduce": cpu_all_reduce,
    "wrong_reshape": wrong_reshape,
    "device_mask": device_mask,
    "pageable_copy": pageable_copy,
    "read_value": read_value,
}
