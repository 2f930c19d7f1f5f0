"""A refit plan: every element of every tensor travels once, in its round, however the streams are
cut; counted before anything moves.
"""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import bind
from megatron_policy.coordination.process_group import PendingCollective
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.parallel.topology import LayerSplit, Placement, Topology
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.plan import RefitPlan, RefitTensor, pack_tensors
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.rounds import Kept, make_rounds, stream_together
from megatron_policy.refit.sources import Sources, stream_alone
from tests.families import SAMPLES

# What a stream has beside tensors: alignment. (Vocabularies and groups that ranks share unevenly,
# as others here do, take more: the streams are as long as the longest.)
SLACK = 1.02


def model_of(path: Path, tp: int = 1, pp: int = 1, **sizes: int) -> RefitModel:
    table = bind(read_config(path))
    dtypes = {name: tensor.dtype for name, tensor in files(path).items()}
    split = LayerSplit.of(table.architecture.num_layers, pp)
    return RefitModel(table, split, dtypes, torch.float32, Topology(tp=tp, pp=pp, **sizes))


def files(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def sources_of(model: RefitModel, tensors: dict[str, torch.Tensor], rank: int) -> Sources:
    """One rank's parameters, as loading fills them."""
    table, topology = model.table, model.topology
    architecture = table.architecture
    place = Placement(topology, topology.coords(rank), model.split)
    layers = [layer for chunk in range(topology.vpp) for layer in place.layers(chunk)]
    ends = (place.holds_embedding(0), place.holds_head(topology.vpp - 1))
    experts = place.experts(architecture.moe.experts) if architecture.moe else None
    held = []
    for entry in table.entries_of(layers, *ends, experts):
        number, size = place.shard_of(entry.row)
        shard = torch.empty(entry.row.local_shape(architecture, size))
        parts = [tensors[name] for name in entry.hf]
        fill_shard(entry.row, architecture, shard, parts, number, size)
        held.append((entry, shard))
    return Sources(held, architecture)


class Channel:
    """One rank's end of a group, in place of `BoundedProcessGroup`: threads exchange memory, and an
    exchange that not all join fails.
    """

    def __init__(self, size: int) -> None:
        self.barrier, self.memory = threading.Barrier(size, timeout=600), [torch.empty(0)] * size
        self.rank, self.size, self.calls = 0, size, 0

    def of_rank(self, rank: int) -> Channel:
        end = copy.copy(self)
        end.rank = rank
        return end

    def broadcast(self, memory: torch.Tensor, source: int) -> PendingCollective:
        return self._exchanged(memory, lambda all_: all_[source])

    def all_gather(self, memory: torch.Tensor) -> PendingCollective:
        def own_parts(all_: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([one.view(self.size, -1)[rank] for rank, one in enumerate(all_)])

        return self._exchanged(memory, own_parts)

    def sum(self, memory: torch.Tensor) -> PendingCollective:
        return self._exchanged(memory, lambda all_: torch.stack(all_).sum(0, dtype=memory.dtype))

    def _exchanged(self, memory: torch.Tensor, result: Any) -> PendingCollective:
        if self.size > 1:
            self.calls += 1
            self.memory[self.rank] = memory.clone()
            self.barrier.wait()
            memory.copy_(result(self.memory))
            self.barrier.wait()
        return PendingCollective(self, None)  # type: ignore[arg-type]


def together(
    plan: RefitPlan, model: RefitModel, tensors: dict[str, torch.Tensor], *, detached: bool = False
) -> list[dict[str, torch.Tensor]]:
    """What every rank of the topology receives; each runs in a thread of its own. Of a `detached`
    refit parameters are gone before anything is exchanged.
    """
    grid, taken = model.topology, [0] * model.topology.world_size
    plan = plan.in_rounds if detached else plan
    channels: dict[object, Channel] = {}
    lock = threading.Lock()

    def channel(name: object, rank: int, size: int) -> Any:
        with lock:
            return channels.setdefault(name, Channel(size)).of_rank(rank)

    def received(rank: int) -> dict[str, torch.Tensor]:
        at, experts = grid.coords(rank), grid.expert_coords(rank)
        sources = sources_of(model, tensors, rank)
        tp = channel(("tp", at.pp, at.dp, at.cp), at.tp, grid.tp)
        pp = channel(("pp", at.dp, at.cp, at.tp), at.pp, grid.pp)
        held = grid.ep * grid.expert_tp
        number = experts.ep * grid.expert_tp + experts.etp
        of_experts = channel(("experts", at.pp, experts.edp), number, held)
        found: dict[str, torch.Tensor] = {}

        def place(tensor: RefitTensor) -> BufferSlice:
            return BufferSlice(Buffer.on(torch.device("cpu"), tensor.nbytes), 0)

        kept: list[Kept | None] = [None] * len(plan.exchanges)
        if detached:
            pool = PinnedMemoryPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 1 << 14)
            for number, exchange in enumerate(plan.exchanges):
                group = of_experts if exchange.of_experts else tp
                own = make_rounds(exchange, sources, group, pp).keep(pool)
                taken[rank] += sum(piece.numel() for _, pieces in own for piece in pieces)
                kept[number] = own
            for parameter in sources._held.values():
                parameter.fill_(torch.nan)
        for exchange, own in zip(plan.exchanges, kept, strict=True):
            group = of_experts if exchange.of_experts else tp
            stream = (
                stream_together(exchange, make_rounds(exchange, sources, group, pp, own), place)
                if exchange.rounds
                else stream_alone(exchange, sources, place)
            )
            for tensor, target in stream:
                assert target is not None
                assert tensor.name not in found
                found[tensor.name] = target.tensor(tensor.shape, tensor.dtype)
        assert list(found) == [tensor.name for tensor in plan.tensors]
        assert tp.calls + pp.calls + of_experts.calls <= plan.collectives
        return found

    with ThreadPoolExecutor(grid.world_size) as threads:
        found = list(threads.map(received, range(grid.world_size)))
    assert not detached or max(taken) == plan.snapshot_bytes
    return found


@pytest.mark.dear
@pytest.mark.parametrize("family", SAMPLES)
def test_shards_become_the_tensors_again_however_their_streams_are_cut(
    checkpoint: Any, family: str
) -> None:
    path = checkpoint(family)
    expected = files(path)
    for size in (2, 4):
        model = model_of(path, size)
        if model.table.architecture.mixer.num_attention_heads % size:
            continue
        for bucket in (size * 4096, size * 5008, 10**9):
            assert_received(plan_refit(model, bucket_bytes=bucket), model, expected)


def assert_received(plan: RefitPlan, model: RefitModel, expected: dict[str, torch.Tensor]) -> None:
    for detached in (False, True):
        for found in together(plan, model, expected, detached=detached):
            assert set(found) == set(expected) - set(model.table.ignored)
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), name


# Experts one tensor each; stacked in one tensor, with biases; one tensor each beside shared ones.
EXPERT_GRIDS = (
    ("qwen3_moe", {"dp": 2, "ep": 2}),
    ("gpt_oss", {"dp": 4, "ep": 4}),
    ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    ("gpt_oss", {"tp": 2, "etp": 1}),
    ("qwen3_moe", {"dp": 2, "etp": 2}),
    ("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2}),
    ("gpt_oss", {"pp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2, "tp": 2, "ep": 2, "etp": 1}),
    ("deepseek_v3", {"pp": 2, "tp": 2, "etp": 1}),
    ("qwen3_moe", {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "etp": 2}),
    ("gpt_oss", {"tp": 3, "dp": 2, "ep": 2, "etp": 1}),
)


@pytest.mark.dear
@pytest.mark.parametrize(("family", "sizes"), EXPERT_GRIDS)
def test_experts_of_other_ranks_arrive_whole_on_every_rank(
    checkpoint: Any, family: str, sizes: dict[str, int]
) -> None:
    path = checkpoint(family, **({"heads": 6, "groups": 3} if sizes.get("tp") == 3 else {}))
    expected, model = files(path), model_of(path, **sizes)
    for bucket in (32768, 10**9):
        plan = plan_refit(model, bucket_bytes=bucket)
        assert plan.round_bytes <= 1.03 * bucket
        assert_received(plan, model, expected)


def test_an_exchange_of_experts_goes_by_bytes_and_not_by_experts(checkpoint: Any) -> None:
    few = model_of(checkpoint("qwen3_moe", num_experts=8), dp=2, ep=2)
    many = model_of(checkpoint("qwen3_moe", num_experts=32, moe_intermediate_size=4), dp=2, ep=2)
    plans = [plan_refit(model, bucket_bytes=10**9).exchanges[1] for model in (few, many)]
    assert len(plans[1].tensors) == 4 * len(plans[0].tensors)
    # One round, in which each of two owners broadcasts once.
    assert [(plan.rounds, plan.collectives) for plan in plans] == [(1, 2), (1, 2)]
    stacked = plan_refit(model_of(checkpoint("gpt_oss"), dp=2, ep=2), bucket_bytes=10**9)
    assert [(each.rounds, each.collectives) for each in stacked.exchanges[1:]] == [(1, 1)]


@pytest.mark.dear
@pytest.mark.parametrize("family", SAMPLES)
def test_one_rank_alone_streams_every_tensor_bit_equal(checkpoint: Any, family: str) -> None:
    path = checkpoint(family)
    expected, model = files(path), model_of(path)
    plan = plan_refit(model)

    def place(tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(Buffer.on(torch.device("cpu"), tensor.nbytes + 512), 512)

    seen = []
    for tensor, target in stream_alone(plan.exchanges[0], sources_of(model, expected, 0), place):
        assert target is not None
        assert torch.equal(target.tensor(tensor.shape, tensor.dtype), expected[tensor.name])
        seen.append(tensor.name)
    assert seen == [t.name for t in plan.tensors]
    assert sorted(seen) == sorted(set(expected) - set(model.table.ignored))


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (2, 1), (2, 2), (4, 4), (1, 4)])
def test_the_rounds_are_as_few_as_the_bytes_need(checkpoint: Any, size: int, stages: int) -> None:
    model = model_of(checkpoint("llama", tied=True, groups=4, vocab=512), size, stages)
    for bucket in (4096 * 4, 30_000, 100_000, 10**9):
        plan = plan_refit(model, bucket_bytes=bucket)
        assert plan.round_bytes <= 1.03 * bucket, "2 %, and as much for the alignment of small ones"
        assert plan.total_bytes // bucket <= plan.rounds
        assert plan.rounds <= math.ceil(plan.total_bytes * SLACK / bucket)
        assert plan.collectives == plan.rounds * ((size > 1) + (stages > 1))


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"dp": 2, "ep": 2, "pp": 2}])
def test_each_item_is_in_the_rounds_once_and_whole(checkpoint: Any, sizes: dict[str, int]) -> None:
    (*_, exchange) = plan_refit(
        model_of(checkpoint("qwen3_moe"), **sizes), bucket_bytes=20_000
    ).exchanges
    seen: dict[int, list[tuple[int, int]]] = {}
    for number in range(exchange.rounds):
        for item, begin, end in exchange.in_round(number):
            assert 0 <= begin < end <= item.elements
            seen.setdefault(item.start, []).append((begin, end))
        parts = exchange.parts(number)
        ends, begins = ([getattr(part, side) for part in parts] for side in ("end", "begin"))
        assert [0, *ends] == [*begins, exchange.chunk]
    assert len(seen) == len(exchange.items)
    for item in exchange.items:
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
    packs = pack_tensors(tensors, capacity)
    assert [tensor for pack in packs for tensor in pack.tensors] == tensors
    for pack in packs:
        assert len(pack.tensors) == 1 or pack.nbytes <= capacity
        ends = 0
        for tensor, offset in zip(pack.tensors, pack.offsets, strict=True):
            assert offset % 512 == 0
            assert offset >= ends
            ends = offset + tensor.nbytes
        assert ends <= pack.nbytes
