"""What a plan says of memory, against what ranks hold: buffers and states to the byte, and the
tensors that autograd saves within 5 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split, topology_of
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.estimate.activations import Kernels
from megatron_policy.estimate.memory import BatchShape, activation_bytes
from megatron_policy.estimate.states import FP32, ModelRows, Precisions, States, stage_states
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, Layout
from tests.invariance.cases import LAYOUTS
from tests.losses import SequenceNLL
from tests.turns import in_turns

ROWS, LENGTH, TOLERANCE = 8, 32, 0.05
ALIGNMENT = 128
"""Elements to whose multiples Megatron-Core aligns parameters and buckets, at most."""


@dataclass(frozen=True)
class Measured:
    """On one rank, in bytes."""

    stage: int
    states: States
    parameters: int
    """How many it has."""
    saved: int
    """The most that autograd has saved at the same time."""


@contextmanager
def live_saved(known: set[int]) -> Iterator[list[int]]:
    """The most bytes that autograd has saved at the same time, of storages that are not `known`."""
    held: Counter[int] = Counter()
    now, most = [0], [0]

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.key, self.size = storage.data_ptr(), storage.nbytes()
            if self.key in known:
                return
            held[self.key] += 1
            now[0] += self.size * (held[self.key] == 1)
            most[0] = max(most[0], now[0])

        def __del__(self) -> None:
            if self.key in known:
                return
            held[self.key] -= 1
            now[0] -= self.size * (held[self.key] == 0)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        yield most


def measure(config: dict[str, Any], rows: int) -> Measured:
    """A step on a rank over `rows` rows of LENGTH tokens."""
    with open_policy(config) as policy:
        trainable = policy._engine.trainable
        chunks = trainable.chunks
        known = {
            tensor.untyped_storage().data_ptr()
            for chunk in chunks
            for tensor in (*chunk.module.parameters(), *chunk.module.buffers())
        }
        torch.manual_seed(0)
        data = BatchedDataDict(
            input_ids=torch.randint(5, 200, (rows, LENGTH)),
            input_lengths=torch.full((rows,), LENGTH),
            token_mask=torch.ones(rows, LENGTH),
            sample_mask=torch.ones(rows),
        )
        moe = policy._engine.table.architecture.moe
        if moe is not None:
            data["routed_experts"] = evenly_routed(rows, policy._engine.table.architecture)
        with live_saved(known) as most:
            policy.train(data, SequenceNLL())
        shards = list(optimizer_shards(trainable.optimizer))
        moments = sum(shard.state[name].nbytes for shard in shards for name in shard.moments)
        buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        return Measured(
            stage=policy.coords.pp,
            states=States(
                parameters=_parameters(chunks),
                gradients=sum(b.grad_data.nbytes for b in buffers),
                main_parameters=sum(s.main.nbytes for s in shards if s.separate),
                moments=moments,
            ),
            parameters=sum(1 for chunk in chunks for _ in chunk.module.parameters()),
            saved=most[0],
        )


def evenly_routed(rows: int, arch: Any) -> torch.Tensor:
    """Choices `[B, S, L, K]` that give each expert equally many tokens."""
    number, chosen = arch.moe.experts, arch.moe.chosen
    shape = rows, LENGTH, len(arch.expert_layers), chosen
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH, 1, 1)
    choices = tokens * chosen + torch.arange(chosen)
    return (choices % number).expand(shape).contiguous()


def _parameters(chunks: Any) -> int:
    """Bytes of parameters, whose storages can be shared, and of the routers' biases."""
    modules = [module for chunk in chunks for module in chunk.module.modules()]
    biases = [module.expert_bias for module in modules if hasattr(module, "expert_bias")]
    held = [
        *(parameter for chunk in chunks for parameter in chunk.module.parameters()),
        *(bias for bias in biases if bias is not None),
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in held}
    return sum(storage.nbytes() for storage in storages.values())


def sized(layout: Layout, path: Path, packed: bool = False) -> dict[str, Any]:
    """A configuration in bf16 of 8 rows, one to a microbatch; two to one that is packed."""
    top: dict[str, Any] = {"train_micro_batch_size": 1, "train_global_batch_size": ROWS}
    if packed:
        top["sequence_packing"] = {"enabled": True, "train_mb_tokens": 2 * LENGTH}
    if bind(read_config(path)).architecture.moe is not None:
        top["router_replay"] = {"enabled": True}
    return policy_config(
        path, layout.megatron, precision="bfloat16", max_total_sequence_length=LENGTH, **top
    )


FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")
CASES: dict[str, tuple[str, Layout, bool]] = {
    **{name: ("qwen2" if "PP2" in name else "qwen3", of, False) for name, of in LAYOUTS.items()},
    "one process, packed": ("qwen3", LAYOUTS["one process"], True),
    "TP2+SP, packed": ("qwen3", LAYOUTS["TP2+SP"], True),
    **{
        f"{name}, {family}": (family, of, False)
        for (name, of), families in zip(
            EXPERT_LAYOUTS.items(), cycle((FAMILIES[:2], FAMILIES[2:])), strict=False
        )
        for family in families
        if family != "gpt_oss" or "ETP2" not in name  # its experts have biases
    },
}


@pytest.mark.parametrize("case", in_turns(CASES))
def test_plan_says_what_ranks_hold(ranks, checkpoint, case: str) -> None:
    family, layout, packed = CASES[case]
    path = checkpoint(family, tied=family == "qwen2")
    raw = sized(layout, path, packed)
    config, table = PolicyConfig.parse(raw), bind(read_config(path))
    topology = topology_of(config, layout.world)
    split, model = layer_split(config, table.architecture, topology), ModelRows.of(table)
    workload = BatchShape.of(config, LENGTH)
    found = ranks.run(layout.world, measure, raw, ROWS)
    distributed = config.megatron_cfg.optimizer.use_distributed_optimizer
    for each in found:
        expected = stage_states(model, split, topology, each.stage, Precisions.of(config))
        assert each.states.parameters == expected.parameters
        assert each.states.gradients == expected.gradients
        for kind in ("main_parameters", "moments"):
            held, planned = getattr(each.states, kind), getattr(expected, kind)
            # A share of the buffers has their alignment in it, of which no state is held.
            padding = each.parameters * ALIGNMENT * 2 * FP32 if distributed else 0
            assert planned - padding <= held <= planned
        kept = activation_bytes(
            config, table.architecture, topology, workload, each.stage, Kernels(False, False)
        )
        assert kept == pytest.approx(each.saved, rel=TOLERANCE)
