"""The layouts every promise is checked under, and the tiny models they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Neither divides by the tensor-parallel sizes: the vocabulary is padded, and so are sequences.
VOCAB, LENGTH = 251, 13
SIZES = {"layers": 4, "heads": 4, "groups": 2, "hidden": 64, "vocab": VOCAB}


@dataclass(frozen=True)
class Layout:
    world: int
    tp: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        size: int = self.megatron.get("expert_model_parallel_size", 1)
        return size

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of experts."""
        size: int = self.megatron.get("expert_tensor_parallel_size", self.tp)
        return size


def layout(world: int, tp: int = 1, pp: int = 1, vpp: int = 1, **more: Any) -> Layout:
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
    }
    return Layout(world, tp, sizes | more)


OVERLAPPED = {
    "optimizer": {"use_distributed_optimizer": True},
    "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
LAYOUTS = {
    "one process": layout(1),
    "TP2": layout(2, tp=2),
    "TP2+SP": layout(2, tp=2, sequence_parallel=True),
    "PP2": layout(2, pp=2),
    "PP2 uneven": layout(2, pp=2, num_layers_in_first_pipeline_stage=1),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "DP2": layout(2),
    "DP2 distributed optimizer, both overlaps": layout(2, **OVERLAPPED),
    "TP2xPP2xDP2+SP": layout(8, tp=2, pp=2, sequence_parallel=True, **OVERLAPPED),
    "TP4 over 2 groups": layout(4, tp=4),
    "TP2xCP2+SP": layout(4, tp=2, sequence_parallel=True, context_parallel_size=2),
}
FSDP2_LAYOUTS = {
    "FSDP2 x 2": Layout(2, megatron={"dtensor_cfg": {}}),
    "FSDP2 x 4": Layout(4, megatron={"dtensor_cfg": {"activation_checkpointing": True}}),
    "FSDP2 2x2 copies": Layout(4, megatron={"dtensor_cfg": {"dp_replicate_size": 2}}),
    "FSDP2 CP2": Layout(2, megatron={"dtensor_cfg": {"context_parallel_size": 2}}),
}
"""Of the engine over transformers' own modules; `megatron` then has its section alone."""
STRATEGY = "sharding_strategy"
RECOMPUTED_AND_OFFLOADED = {"activation_checkpointing_enabled": True, "fsdp_offload_enabled": True}
FSDP1_LAYOUTS = {
    "FSDP1 x 2": Layout(2, megatron={"fsdp_cfg": {}}),
    "FSDP1 x 4": Layout(4, megatron={"fsdp_cfg": RECOMPUTED_AND_OFFLOADED}),
    "FSDP1 x 2, gradients": Layout(2, megatron={"fsdp_cfg": {STRATEGY: "shard_grad_op"}}),
    "FSDP1 2 copies": Layout(2, megatron={"fsdp_cfg": {STRATEGY: "no_shard"}}),
}
"""The same, sharded the other way."""


def of_transformers(sections: Mapping[str, Any]) -> bool:
    """Whether they are of the engine over transformers' own modules."""
    return "dtensor_cfg" in sections or "fsdp_cfg" in sections


SP = {"sequence_parallel": True}
FSDP2_TENSOR_LAYOUTS = {
    "FSDP2 TP2 x 2": Layout(4, tp=2, megatron={"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "FSDP2 TP2+SP x 2": Layout(4, tp=2, megatron={"dtensor_cfg": {"tensor_parallel_size": 2} | SP}),
}
"""Those with tensor-parallel ranks."""
EXPERT_LAYOUTS = {
    "EP2": layout(2, expert_model_parallel_size=2),
    "EP4": layout(4, expert_model_parallel_size=4),
    "EP2xTP2+SP": layout(
        2, tp=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, **SP
    ),
    "TP2+SP, experts whole": layout(2, tp=2, expert_tensor_parallel_size=1, **SP),
    "EP2xETP2+TP2": layout(4, tp=2, expert_model_parallel_size=2, **SP),
    "EP2xPP2": layout(4, pp=2, expert_model_parallel_size=2),
    "EP2xPP2xVPP2": layout(4, pp=2, vpp=2, expert_model_parallel_size=2),
    "EP2xCP2": layout(2, context_parallel_size=2, expert_model_parallel_size=2),
    "EP4xDP2, distributed optimizer, overlaps": layout(
        8, expert_model_parallel_size=4, **OVERLAPPED
    ),
    "EP2xTP2xPP2xCP2+SP, distributed optimizer, overlaps": layout(
        8,
        tp=2,
        pp=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        **SP,
        **OVERLAPPED,
    ),
}
"""Layouts of experts; expert-parallel ranks are among the data- and tensor-parallel ones."""
# Tied with biases on q, k, v; untied with norms on q, k.
FAMILIES = {True: "qwen2", False: "qwen3"}
