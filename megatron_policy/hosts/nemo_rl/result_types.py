"""Converts the worker's results to the host's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy.batch import BatchedDataDict
from megatron_policy.hosts.nemo_rl.host_imports import part_or_none


def host_batch(data: Any) -> Any:
    """The same rows as the host's own batch type, whose methods its code may call; unchanged
    without a host. Tensors are shared, a microbatch plan is dropped.
    """
    kind = part_or_none("nemo_rl.distributed.batched_data_dict", "BatchedDataDict")
    return data if kind is None else kind(dict(data))


def training_result(found: Mapping[str, Any]) -> dict[str, Any]:
    """A `TrainResult` under the host's names."""
    names = {"loss": "global_loss", "microbatch_metrics": "all_mb_metrics"}
    return {names.get(key, key): value for key, value in found.items()}


def in_host_types(answer: Any) -> Any:
    """The result in the type that the host's driver expects."""
    return host_batch(answer) if isinstance(answer, BatchedDataDict) else answer
