"""A policy's weights as verl hands them to inference engines: named tensors, one after another.

Merged with adapters, or the base and the adapters apart: verl's rollouts take both. Processes with
inference engines import this module too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_policy.memory.states import SEND_WEIGHTS
from megatron_policy.refit.exporter import stream_tensors
from megatron_policy.refit.manifest import RefitManifest

if TYPE_CHECKING:
    import torch

    from megatron_policy.policy import MegatronPolicy
    from megatron_policy.refit.delivery import Transport

    Named = Iterator[tuple[str, torch.Tensor]]


class WeightStream:
    """All weights in turn, whole; every rank iterates to the end. Or they are sent over a
    transport of ours, with a manifest.
    """

    def __init__(self, policy: MegatronPolicy, *, adapters: bool = False) -> None:
        """Merged with adapters, where there are any, or the `adapters` alone."""
        self.policy, self._adapters = policy, adapters
        self._tensors: Named | None = None

    def __iter__(self) -> WeightStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = self.policy.export(adapters=self._adapters)
        return next(self._tensors)

    def refit(self, transport: Transport) -> RefitManifest:
        """Send them in place of an iteration; see `MegatronPolicy.refit`."""
        return self.policy.refit(transport, adapters=self._adapters)


def base_of_adapters(policy: MegatronPolicy) -> Named:
    """The weights that adapters adapt, as they were before any of them."""
    policy.memory.ready("export()", SEND_WEIGHTS)
    exporter = policy.exporter
    assert exporter.adapters is not None
    with policy.memory.in_use("the base of adapters"), exporter.adapters.off():
        yield from stream_tensors(exporter, exporter.plan())


def peft_config(policy: MegatronPolicy) -> dict[str, Any]:
    """The adapters' configuration as PEFT's `to_dict` gives it, with its own enumerations."""
    from peft import PeftType, TaskType

    found = dict(policy.exporter.select(adapters=True).served_model.adapters or {})
    return found | {
        "peft_type": PeftType(found["peft_type"]),
        "task_type": TaskType(found["task_type"]),
    }
