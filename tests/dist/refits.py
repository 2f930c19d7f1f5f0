"""Policies that hand their weights over, and the layouts under which they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_policy.policy import MegatronPolicy
from tests.dist.layouts import of_transformers

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2 pp2": (4, TP2 | PP2),
    "tp2 cp2": (4, TP2 | {"context_parallel_size": 2}),
    "pp2 vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep4": (4, {"expert_model_parallel_size": 4}),
    "ep2 pp2": (4, PP2 | {"expert_model_parallel_size": 2}),
    "ep2 tp2": (4, TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "fsdp2": (2, {"dtensor_cfg": {"enabled": True}}),
    "fsdp2 tp2": (2, {"dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2}}),
    "fsdp2 tp2 x 2": (4, {"dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2}}),
    "fsdp1": (2, {"fsdp_cfg": {"enabled": True}}),
}


def config_of(path: Path, cfg: dict[str, Any]) -> dict[str, Any]:
    """`cfg` is a section `megatron_cfg`, or the sections of another engine."""
    other = of_transformers(cfg)
    return {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 32,
        **(cfg if other else {"megatron_cfg": {"enabled": True, **cfg}}),
    }


@contextmanager
def serving(path: Path, cfg: dict[str, Any], **top: Any) -> Iterator[MegatronPolicy]:
    """A policy that only hands its weights over."""
    unused = {"init_optimizer": False, "init_reference_model": False}
    policy = MegatronPolicy(config_of(path, cfg) | top, **unused)
    try:
        yield policy
    finally:
        policy.shutdown()
