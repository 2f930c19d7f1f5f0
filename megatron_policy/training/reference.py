"""The frozen reference policy: host copies of this rank's parameters, swapped with the live ones on
demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_policy.device import host_buffer, synchronize


class ReferenceWeights:
    """Parameters as they were when this was made, in (pinned) host memory.

    While the reference is active the host buffers hold the policy's weights. The two are swapped
    tensor by tensor, so the device never holds more than one extra tensor and the host never more
    than one copy.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._frozen = tuple(host_buffer(p.data).copy_(p.data) for p in self._parameters)
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
        exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for pair in zip(self._parameters, self._frozen, strict=True):
                _exchange(*pair)
                exchanged.append(pair)
            synchronize()
            yield
        finally:
            for pair in exchanged:
                _exchange(*pair)
            synchronize()
            self._active = False


@torch.no_grad()
def _exchange(parameter: torch.Tensor, frozen: torch.Tensor) -> None:
    held = parameter.data.clone()
    parameter.data.copy_(frozen)
    frozen.copy_(held)
