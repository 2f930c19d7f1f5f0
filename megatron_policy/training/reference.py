"""The frozen reference policy: host copies of this rank's parameters, swapped with the live ones on
demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_policy.device.exchange import Pair, copy_out, swap
from megatron_policy.interfaces.engine import Adapters
from megatron_policy.memory.pinned_pool import PinnedMemoryPool

_NESTED = "the reference policy is active already; its context does not nest"


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
            raise RuntimeError(_NESTED)
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


class AdaptersOff:
    """The reference of a policy with adapters: the same model without them, which needs no copy."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._active = False

    @property
    def in_use(self) -> bool:
        """As of `ReferenceWeights`."""
        return self._active

    @contextmanager
    def active(self) -> Iterator[None]:
        """As of `ReferenceWeights`."""
        if self._active:
            raise RuntimeError(_NESTED)
        self._active = True
        try:
            with self._adapters.off():
                yield
        finally:
            self._active = False
