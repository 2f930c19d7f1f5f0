"""A refit plan: every element of every tensor travels once, in its round, however the streams are
cut; counted before anything moves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.rows import Rows, fill_shard
from megatron_policy.converters.table import Entry, Table, bind
from megatron_policy.coordination.process_group import PendingCollective
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import LayerSplit, Placement, Topology
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.export import Sources, _Rounds, stream_alone
from megatron_policy.refit.exporter import _refuse_other_shards
from megatron_policy.refit.plan import (
    RefitModel,
    RefitPlan,
    RefitTensor,
    packed,
    plan_refit,
)
from tests.checkpoints import ALL_FAMILIES

# What a stream has beside tensors: alignment. (Vocabularies and groups that ranks share unevenly,
# as others here do, take more: the streams are as long as the longest.)
SLACK = 1.02


def model_of(path: Path, size: int = 1, stages: int = 1, precision=torch.float32) -> RefitModel:
    table = bind(read_config(path))
    dtypes = {name: tensor.dtype for name, tensor in files(path).items()}
    split = LayerSplit.of(table.architecture.num_layers, stages)
    return RefitModel(table, split, dtypes, precision, size)


def files(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def shards(table: Table, tensors: dict[str, torch.Tensor], rank: int, size: int) -> Sources:
    """One tensor-parallel rank's parameters, as loading fills them."""
    held = []
    for entry in table.exported():
        shard = torch.empty(entry.row.local_shape(table.architecture, size))
        parts = [tensors[name] for name in entry.hf]
        fill_shard(entry.row, table.architecture, shard, parts, rank, size)
        held.append((entry, shard))
    return Sources(held, table.architecture)


class Alone:
    """A channel of which the test plays all ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, memory: torch.Tensor) -> PendingCollective:
        return PendingCollective(self, None)  # type: ignore[arg-type]


def together(plan: RefitPlan, sources: list[Sources]) -> dict[str, torch.Tensor]:
    """All ranks' exchanges in one process."""
    everyone: Any = [_Rounds(plan, s, Alone(rank), Alone(0)) for rank, s in enumerate(sources)]
    targets: dict[str, BufferSlice] = {}
    for number in range(plan.rounds):
        for rounds in everyone:
            rounds.start(number)
        for rank, rounds in enumerate(everyone):
            everyone[0]._part(rank).copy_(rounds._part(rank))
        for item, begin, end in plan.in_round(number):
            tensor = item.tensor
            if tensor.name not in targets:
                targets[tensor.name] = BufferSlice(Buffer.on(torch.device("cpu"), tensor.nbytes), 0)
            everyone[0].unpack(item, begin, end, targets[tensor.name])
    return {t.name: targets[t.name].tensor(t.shape, t.dtype) for t in plan.tensors}


def sizes_of(table: Table) -> list[int]:
    return [n for n in (1, 2, 4) if table.architecture.num_attention_heads % n == 0]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_shards_become_the_tensors_again_however_their_streams_are_cut(
    checkpoint: Any, family: str
) -> None:
    path = checkpoint(family)
    expected = files(path)
    for size in sizes_of(bind(read_config(path)))[1:]:
        model = model_of(path, size)
        sources = [shards(model.table, expected, rank, size) for rank in range(size)]
        for bucket in (size * 4096, size * 5008, 10**9):
            plan = plan_refit(model, bucket_bytes=bucket)
            found = together(plan, sources)
            ignored = set(model.table.ignored)
            assert set(found) == set(expected) - ignored
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), (name, size, bucket)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_one_rank_alone_streams_every_tensor_bit_equal(checkpoint: Any, family: str) -> None:
    path = checkpoint(family)
    expected, model = files(path), model_of(path)
    plan = plan_refit(model)

    def place(tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(Buffer.on(torch.device("cpu"), tensor.nbytes + 512), 512)

    seen = []
    for tensor, target in stream_alone(plan, shards(model.table, expected, 0, 1), place):
        assert target is not None
        assert torch.equal(target.tensor(tensor.shape, tensor.dtype), expected[tensor.name])
        seen.append(tensor.name)
    assert len(set(seen)) == len(seen)
    assert seen == [t.name for t in plan.tensors]
    assert set(seen) == set(expected) - set(model.table.ignored)


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (2, 1), (2, 2), (4, 4), (1, 4)])
@pytest.mark.parametrize("bucket", [4096 * 4, 30_000, 100_000, 10**9])
def test_the_rounds_are_as_few_as_the_bytes_need(
    checkpoint: Any, size: int, stages: int, bucket: int
) -> None:
    path = checkpoint("llama", tied=True, groups=4, vocab=512)
    plan = plan_refit(model_of(path, size, stages), bucket_bytes=bucket)
    assert plan.shards * plan.chunk <= 1.03 * bucket, (
        "2 %, and as much for the alignment of small ones"
    )
    assert plan.rounds <= math.ceil(plan.total_bytes * SLACK / bucket)
    assert plan.rounds >= plan.total_bytes // bucket
    assert plan.collectives == plan.rounds * ((size > 1) + (stages > 1))


def test_layers_do_not_make_rounds_at_equal_bytes(checkpoint: Any) -> None:
    few = plan_refit(model_of(checkpoint("qwen3", layers=2, ffn=256), 2), bucket_bytes=65536)
    many = plan_refit(model_of(checkpoint("qwen3", layers=4, ffn=64), 2), bucket_bytes=65536)
    assert len(many.tensors) > len(few.tensors) * 1.5
    per_byte = few.rounds / few.total_bytes, many.rounds / many.total_bytes
    assert math.isclose(*per_byte, rel_tol=0.15), "rounds follow the bytes"


def test_each_item_is_in_the_rounds_once_and_whole(checkpoint: Any) -> None:
    plan = plan_refit(model_of(checkpoint("qwen3_moe"), 2, 2), bucket_bytes=20_000)
    seen: dict[int, list[tuple[int, int]]] = {}
    for number in range(plan.rounds):
        for item, begin, end in plan.in_round(number):
            assert 0 <= begin < end <= item.elements
            seen.setdefault(item.start, []).append((begin, end))
    assert len(seen) == len(plan.items)
    for item in plan.items:
        runs = seen[item.start]
        assert [0, *[end for _, end in runs]] == [*[begin for begin, _ in runs], item.elements]


def test_a_plan_of_a_stage_has_its_tensors_and_no_exchange_of_stages(checkpoint: Any) -> None:
    model = model_of(checkpoint("qwen2"), 1, 2)
    whole = plan_refit(model)
    parts = [plan_refit(model, stage=stage) for stage in (0, 1)]
    assert [*parts[0].tensors, *parts[1].tensors] == list(whole.tensors)
    assert [part.collectives for part in parts] == [0, 0]
    assert whole.collectives == whole.rounds == 1


def test_dtypes_follow_the_checkpoint_or_the_target_and_the_wire_takes_the_narrower(
    checkpoint: Any,
) -> None:
    model = model_of(checkpoint("deepseek_v3"), 2)
    kept = {name for entry in model.table.exported() if entry.row.keeps_dtype for name in entry.hf}
    assert kept, "this family has a router bias that stays as it is"
    plan = plan_refit(model, dtype=torch.bfloat16)
    for item in plan.items:
        wide = item.tensor.name in kept
        assert item.tensor.dtype == (torch.float32 if wide else torch.bfloat16)
        assert item.sent_dtype == item.tensor.dtype
    assert {item.sent_dtype for item in plan_refit(model).items} == {torch.float32}


def test_what_cannot_be_planned_is_refused_by_name(checkpoint: Any) -> None:
    model = model_of(checkpoint("qwen2"), 2)
    with pytest.raises(ConfigError, match=r"100 bytes is too small: give 8192 or more"):
        plan_refit(model, bucket_bytes=100)
    with pytest.raises(RefitError, match=r"has no HF tensor model\.gone"):
        plan_refit(model, names=("model.gone", "model.norm.weight"))
    only = plan_refit(model, names=("model.norm.weight",))
    assert list(only.info()) == ["model.norm.weight"]


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(512, 8192))
def test_packs_hold_every_tensor_in_order_aligned_and_within_their_capacity(
    sizes: list[int], capacity: int
) -> None:
    tensors = [RefitTensor(str(i), (n,), torch.uint8, 0) for i, n in enumerate(sizes)]
    packs = packed(tensors, capacity)
    assert [tensor for pack in packs for tensor in pack.tensors] == tensors
    for pack in packs:
        assert len(pack.tensors) == 1 or pack.nbytes <= capacity
        ends = 0
        for tensor, offset in zip(pack.tensors, pack.offsets, strict=True):
            assert offset % 512 == 0
            assert offset >= ends
            ends = offset + tensor.nbytes
        assert ends <= pack.nbytes


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"tp": 2, "dp": 2}, False),
        ({"tp": 2, "dp": 2, "etp": 1}, True),
        ({"tp": 1, "dp": 4, "etp": 2}, True),
        ({"tp": 1, "dp": 4, "ep": 2}, True),
    ],
)
def test_experts_on_other_ranks_than_those_that_exchange_shards_are_refused(
    sizes: dict[str, int], refused: bool
) -> None:
    topology = Topology(**sizes)
    place = Placement(topology, topology.coords(0), LayerSplit.of(1, 1))
    weight = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    row = Rows("experts.{expert}.fc2", ("down",), ("hidden_size", "ffn_hidden_size"))
    held = [Entry(weight, ("down",), row, 0, "layer", 1)]
    if not refused:
        _refuse_other_shards(place, held)
        return
    with pytest.raises(ConfigError, match=r"local_experts\.1.*set expert_tensor_parallel_size to"):
        _refuse_other_shards(place, held)
