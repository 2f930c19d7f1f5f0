"""The stream of Hugging Face tensors: whole, in order, bit-equal, over every layout, counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.plan import RefitTensor
from tests.dist.layouts import of_transformers
from tests.dist.test_export import tensors_of
from tests.ranks import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2 pp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "pp2 vpp2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "dp2": (2, {}),
    "fsdp2": (2, {"dtensor_cfg": {"enabled": True}}),
    "fsdp1": (2, {"fsdp_cfg": {"enabled": True}}),
}
SMALL = 16 * 1024


def config_of(path: Path, cfg: dict[str, Any], precision: str = "float32") -> dict[str, Any]:
    """`cfg` is a section `megatron_cfg`, or the sections of another engine."""
    other = of_transformers(cfg)
    return {
        "model_name": str(path),
        "precision": precision,
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 32,
        **(cfg if other else {"megatron_cfg": {"enabled": True, **cfg}}),
    }


def streamed(path: Path, cfg: dict[str, int], bucket: int, **options: Any) -> dict[str, Any]:
    policy = MegatronPolicy(config_of(path, cfg), init_optimizer=False, init_reference_model=False)
    try:
        exporter = policy.exporter
        plan = exporter.plan(bucket_bytes=bucket, **options)
        found: list[tuple[str, torch.Tensor]] = []
        placed: list[str] = []

        def place(tensor: RefitTensor) -> BufferSlice:
            assert len(placed) == len(found), "placed before the last one was complete"
            placed.append(tensor.name)
            return BufferSlice(Buffer.on(exporter.device, tensor.nbytes), 0)

        before = exporter.calls
        for tensor, target in exporter.stream(plan, place):
            assert target is not None
            found.append((tensor.name, target.tensor(tensor.shape, tensor.dtype).clone()))
        calls = exporter.calls - before
        exporter.agree(None)
        assert [name for name, _ in found] == placed == [t.name for t in plan.tensors]
        return {
            "tensors": dict(found),
            "calls": calls,
            "total": plan.total_bytes,
            "rounds": plan.rounds,
            "groups": (policy.topology.tp > 1) + (policy.topology.pp > 1),
            "info": plan.info(),
        }
    finally:
        policy.shutdown()


FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("apertus", {}),  # which has tensors without dimensions
    ("llama", {"tied": True}),
    ("mixtral", {}),
)


@pytest.mark.parametrize("layout", ["one", "tp2 pp2", "pp2 vpp2"])
@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_every_rank_gets_every_tensor_once_bit_equal_in_as_few_rounds_as_bytes_need(
    ranks: RankPool, checkpoint: Any, layout: str, family: str, options: dict[str, Any]
) -> None:
    world, cfg = LAYOUTS[layout]
    path = checkpoint(family, **options)
    expected = tensors_of(path)
    for result in ranks.run(world, streamed, path, cfg, SMALL * 2):
        assert set(result["tensors"]) == set(expected)
        for name, tensor in result["tensors"].items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.dtype == expected[name].dtype
        assert result["rounds"] > 1 or not result["groups"], "or nothing is cut"
        bound = 2 + math.ceil(result["total"] / (2 * SMALL)) * max(1, result["groups"])
        assert result["calls"] + 1 <= bound, "the closing agreement included"
