"""The frozen reference policy: host copies of this rank's parameters, swapped with the live ones on
demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_policy.device.exchange import Pair, copy_out, swap
from megatron_policy.memory.pinned_pool import PinnedMemoryPool


class ReferenceWeights:
    """Parameters as they were when this was made, in (pinned) host memory.

    While the reference is active that memory holds the policy's weights. The two are swapped tensor
    by tensor, so the device never holds more than two extra tensors and the host never more than
    one copy.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        pool = PinnedMemoryPool()
        self._parameters = tuple(parameters)
        self._frozen = tuple(pool.take(p.data.nbytes) for p in self._parameters)
        copy_out(self._pairs())
        self._active = False

    @property
    def in_use(self) -> bool:
        """Whether the model computes with the reference's weights now."""
        return self._active

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context the model computes with the reference's weights; its own are always
        restored afterwards.
        """
        if self._active:
            raise RuntimeError("the reference policy is active already; its context does not nest")
        self._active = True
        try:
            swap(self._pairs())
            try:
                yield
            finally:
                swap(self._pairs())
        finally:
            self._active = False

    def _pairs(self) -> list[Pair]:
        return [(p.data, pieces) for p, pieces in zip(self._parameters, self._frozen, strict=True)]
