"""Which rank writes which part of a training checkpoint: together every element, and each once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest
import torch

from megatron_policy.adapters.targets import choose_adapters
from megatron_policy.checkpoint import local_shards
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.parallel.topology import LayerSplit, Placement, Topology
from tests.pure.test_config import minimal
from tests.pure.test_table import small

RANKS = 4
PEFT = {"megatron_cfg.peft": {"enabled": True, "dim": 2, "alpha": 4.0}}


def topologies() -> Iterator[Topology]:
    sizes = (1, 2, 4)
    for tp, cp, dp, ep, etp in product(sizes, repeat=5):
        if tp * cp * dp <= RANKS:
            with suppress(ConfigError):
                yield Topology(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)


def times_written(table: Table, topology: Topology) -> dict[str, torch.Tensor]:
    """How often all ranks together write each element of each key."""
    found: dict[str, torch.Tensor] = {}
    model = table.architecture
    for rank in range(topology.world_size):
        place = Placement(topology, topology.coords(rank), LayerSplit.of(model.num_layers, 1))
        experts = None if model.moe is None else place.experts(model.moe.experts)
        entries = table.entries_of(range(model.num_layers), True, True, experts)
        shapes = [e.row.local_shape(model, place.shard_of(e.row).size) for e in entries]
        held = [(e, torch.empty(shape)) for e, shape in zip(entries, shapes, strict=True)]
        shards = local_shards.list_weights(held, model, place)
        for item in local_shards.plan_items(shards, model, place):
            box = tuple(slice(a, a + n) for a, n in zip(item.origin, item.sizes, strict=True))
            found.setdefault(item.key, torch.zeros(item.shape, dtype=torch.uint8))[box] += 1
    return found


@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_all_ranks_write_every_element_once(family: str, adapted: bool) -> None:
    table: Table | None = small(family)
    if adapted:
        table = choose_adapters(PolicyConfig.parse(minimal(**PEFT)), small(family))
    assert table is not None
    keys = times_written(table, Topology()).keys()
    split = set()
    for topology in topologies():
        with suppress(ConversionError):  # sizes that do not divide the model
            written = times_written(table, topology)
            assert written.keys() == keys, topology
            assert [k for k, times in written.items() if not (times == 1).all()] == [], topology
            split.add(topology)
    assert len(split) > 10
