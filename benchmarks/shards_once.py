"""What trainer 0 computes before the first byte of a refit from the shards of 512 trainers to those
of 128 engine ranks, of a model of 1.03 trillion parameters: `python -m benchmarks.shards_once`.

Prints CPU seconds and the peak of memory for it, from the config on, those seconds of the plan
alone, the bytes of what it tells the engines, and the most bytes that an engine rank receives over
those that it holds.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch

from benchmarks.logprob_once import memory, start_of_peak
from megatron_policy.converters.table import bind
from megatron_policy.parallel.topology import LayerSplit, Topology
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.shards import place_on_grid, plan_shards
from megatron_policy.refit.transports.collective.shards import (
    ShardLayout,
    encode_layouts,
    list_runs,
)

KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TRAINERS = Topology(pp=8, tp=8, dp=8, ep=64, etp=1)
ENGINE = Topology(tp=8, dp=16, ep=128, etp=1)


def main() -> dict[str, float]:
    """Make the plan, what the trainer sends and what it tells the engines, and measure it."""
    before, started = start_of_peak(), time.process_time()
    table = bind(KIMI_K2)
    split = LayerSplit.of(table.architecture.num_layers, TRAINERS.pp, first=7, last=6)
    dtypes = dict.fromkeys(table.hf_shapes(), torch.bfloat16)
    plan = plan_refit(RefitModel(table, split, dtypes, torch.bfloat16, TRAINERS))
    placements = place_on_grid(plan, table.architecture, ENGINE)
    ranks = ENGINE.world_size
    shards = plan_shards(plan, table.architecture, TRAINERS, placements, ranks)
    planned = time.process_time() - started
    runs, layouts = list_runs(shards, 0), encode_layouts(shards)
    seconds, held = time.process_time() - started, memory("VmHWM") - before
    received = shards.received
    for engine, content in enumerate(layouts):
        if list(ShardLayout.decode(content).runs[0]) != runs[engine]:
            raise RuntimeError(f"engine rank {engine} is told of other runs than it gets")
    own = [0] * ranks
    for tensor in plan.tensors:
        placement = placements[tensor.name]
        for part, holders in enumerate(placement.holders):
            shape = placement.shape(tensor.shape, part)
            for rank in holders:
                own[rank] += math.prod(shape) * tensor.dtype.itemsize
    return {
        "cpu_s": seconds,
        "planned_s": planned,
        "told_bytes": sum(map(len, layouts)),
        "held_bytes": held,
        "parameters": sum(math.prod(tensor.shape) for tensor in plan.tensors),
        "transfers": len(shards.transfers),
        "received_over_own": max(r / o for r, o in zip(received, own, strict=True)),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
