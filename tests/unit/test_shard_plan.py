"""A plan from shards to shards: every engine rank gets its own elements, each once, whatever the
family and both layouts; senders take turns; a model of a trillion parameters is planned too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import LayerSplit, Topology
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.shards import EngineShards, place_on_grid, plan_shards
from megatron_policy.refit.transports.collective.shards import (
    ShardLayout,
    encode_layouts,
    list_runs,
)
from tests.families import PUBLISHED, SAMPLES
from tests.unit.test_refit_plan import files, model_of, sources_of

LAYOUTS: dict[str, tuple[dict[str, int], Topology]] = {
    "tp2 dp2 to tp2": ({"tp": 2, "dp": 2}, Topology(tp=2)),
    "tp1 dp2 to tp4 dp2": ({"dp": 2}, Topology(tp=4, dp=2)),
    "tp4 to one": ({"tp": 4}, Topology()),
    "tp2 pp2 to tp2 pp2": ({"tp": 2, "pp": 2}, Topology(tp=2, pp=2)),
    "ep2 tp2 to ep4": ({"tp": 2, "ep": 2, "dp": 2, "etp": 1}, Topology(tp=2, dp=2, ep=4, etp=1)),
    "ep4 to tp2": ({"dp": 4, "ep": 4}, Topology(tp=2)),
}
"""The trainer's sizes, and the engine's grid."""


def receive_all(model: Any, tensors: Any, grid: Topology, placements: Any) -> Any:
    """What each engine rank has after the transfers of a plan, and the plan."""
    plan = plan_refit(model, dtype=torch.float32)
    shards = plan_shards(
        plan, model.table.architecture, model.topology, placements, grid.world_size
    )
    sources = [sources_of(model, tensors, r) for r in range(model.topology.world_size)]
    received: list[dict[str, torch.Tensor]] = [{} for _ in range(grid.world_size)]
    for each in shards.transfers:
        held = received[each.target]
        to = held.setdefault(each.tensor.name, torch.full(each.shape, torch.nan)).view(-1)
        for own, at in each.moves:
            into = to.as_strided(at.size, at.stride, at.offset)
            assert into.isnan().all(), "these were sent before"
            into.copy_(sources[each.source].view(each.entry, own))
    return received, shards, plan


def check(path: Path, layout: str) -> None:
    sizes, grid = LAYOUTS[layout]
    model, tensors = model_of(path, **sizes), files(path)
    placements = place_on_grid(plan_refit(model), model.table.architecture, grid)
    received, shards, plan = receive_all(model, tensors, grid, placements)
    for tensor in plan.tensors:
        at, whole = placements[tensor.name], tensors[tensor.name].float()
        for part, holders in enumerate(at.holders):
            low, high = at.bounds(tensor.shape or (1,), part)
            own = whole.narrow(at.dim, low, high - low) if whole.dim() else whole
            for rank in holders:
                held = received[rank].pop(tensor.name, own.new_empty(own.shape))
                assert torch.equal(held, own), (tensor.name, rank)
    assert not any(received), "something belongs to nobody"
    layouts = [ShardLayout.decode(content) for content in encode_layouts(shards)]
    for sender in range(shards.trainers):
        told = [list(layout.runs[sender]) for layout in layouts]
        assert told == list_runs(shards, sender)
    own = sum(t.elements * 4 for t in shards.transfers)
    assert sum(shards.sent) == sum(shards.received) == own


CELLS = [
    (family, layout)
    for family, samples in SAMPLES.items()
    for layout in LAYOUTS
    if samples.experts or "ep" not in layout
]
DAILY = ("qwen2", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*cell, marks=[pytest.mark.daily] * (cell[0] in DAILY)) for cell in CELLS],
)
def test_each_engine_rank_gets_its_own_elements_once(
    checkpoint: Any, family: str, layout: str
) -> None:
    check(checkpoint(family), layout)


def test_an_engine_splits_as_it_says(checkpoint: Any) -> None:
    """Columns in uneven chunks, on ranks in another order, and vectors on one rank alone."""
    path = checkpoint("llama", vocab=251)
    model, tensors, grid = model_of(path, tp=2, dp=2), files(path), Topology(dp=3)
    held = {
        name: EngineShards(1, -(-t.shape[1] // 3), ((2,), (0,), (1,)))
        if t.dim() > 1
        else EngineShards(0, t.shape[0], ((1,),))
        for name, t in tensors.items()
    }
    received, shards, _ = receive_all(model, tensors, grid, held)
    for name, of in held.items():
        dim, chunk = of.dim, of.chunk
        for part, (rank,) in enumerate(of.holders):
            whole = tensors[name].float()
            own = whole.narrow(dim, part * chunk, min(chunk, whole.shape[dim] - part * chunk))
            assert torch.equal(received[rank][name], own), name
    assert sum(shards.received) == 4 * sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("holding", "said"),
    [
        (None, "lacks model.norm.weight"),
        (EngineShards(0, 63, ((0,),)), "does not hold all of model.norm.weight"),
        (EngineShards(1, 64, ((0,),)), "does not hold all of model.norm.weight"),
        (EngineShards(0, 32, ((0,), ())), "does not hold all of model.norm.weight"),
    ],
)
def test_a_layout_that_lacks_something_is_refused(
    checkpoint: Any, holding: EngineShards | None, said: str
) -> None:
    model = model_of(checkpoint("llama"))
    plan, architecture = plan_refit(model), model.table.architecture
    held = place_on_grid(plan, architecture, Topology())
    held.pop("model.norm.weight")
    held |= {"model.norm.weight": holding} if holding else {}
    with pytest.raises(ConfigError, match=said):
        plan_shards(plan, architecture, model.topology, held, 1)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (None, "the engine's layout is None: give an EngineShards"),
        ({"model.nrom.weight": EngineShards(0, 64, ((0,),))}, "has model.nrom.weight, which the"),
        ({"model.norm.weight": (0, 64, ((0,),))}, r"has \(0, 64, .* for model.norm.weight: give"),
    ],
)
def test_a_layout_of_other_tensors_is_refused(checkpoint: Any, held: Any, said: str) -> None:
    model = model_of(checkpoint("llama"))
    plan, architecture = plan_refit(model), model.table.architecture
    held = held and place_on_grid(plan, architecture, Topology()) | held
    with pytest.raises(ConfigError, match=said):
        plan_shards(plan, architecture, model.topology, held, 1)


@pytest.mark.parametrize(
    "content",
    [
        '[["a"],[["bfloat16",[4],[[[4],[1],0]]]],[[0]]]',
        '[["a"],[["bfloat16",[4],[[[4],[1],0]]]],[[0,1]]]',
        '[["a"],[["bfloat16",[4],[[[2],[1],0]]],["float32",[4],[[[2],[1],2]]]],[[0,0,0,1]]]',
        '[{"a":["bfloat16",[4]]},[[["a",[[[4],[1],0]]]]]]',
    ],
)
def test_a_damaged_layout_is_refused(content: str) -> None:
    with pytest.raises(RefitError, match="list of shards cannot be read"):
        ShardLayout.decode(content.encode())


@pytest.mark.nightly
def test_512_ranks_send_a_trillion_parameters_evenly_to_128() -> None:
    """Counted, of Kimi K2: each engine rank gets what it has, and the trainers of a stage send
    equal shares.
    """
    parameters, config = PUBLISHED["Kimi-K2-Instruct in bf16"]
    table = bind(config)
    topology = Topology(pp=8, tp=8, dp=8, ep=64, etp=1)
    split = LayerSplit.of(table.architecture.num_layers, 8, first=7, last=6)
    dtypes = dict.fromkeys(table.hf_shapes(), torch.bfloat16)
    plan = plan_refit(RefitModel(table, split, dtypes, torch.bfloat16, topology))
    engine = Topology(tp=8, dp=16, ep=128, etp=1)
    held = place_on_grid(plan, table.architecture, engine)
    shards = plan_shards(plan, table.architecture, topology, held, 128)
    own = [0] * 128
    for tensor in plan.tensors:
        at = held[tensor.name]
        for part, holders in enumerate(at.holders):
            nbytes = math.prod(at.shape(tensor.shape, part)) * tensor.dtype.itemsize
            for rank in holders:
                own[rank] += nbytes
    assert parameters > 1e12 and shards.received == own
    for stage in range(8):
        sent = shards.sent[64 * stage : 64 * stage + 64]
        assert max(sent) <= 1.001 * sum(sent) / 64
