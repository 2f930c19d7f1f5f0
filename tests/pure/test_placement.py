"""A rank's place: every layer, the embedding and the head fall to exactly one chunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from megatron_policy.parallel.topology import LayerSplit, Placement, Topology


@dataclass
class Parameter:
    megatron: str


@pytest.mark.parametrize("of_expert", [False, True])
@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ({"tp": 2, "cp": 2, "dp": 3, "pp": 2}, (2, 2)),
        ({"tp": 2, "dp": 4, "ep": 2, "etp": 1}, (2, 1)),
        ({"tp": 1, "dp": 8, "ep": 2, "etp": 2}, (1, 2)),
        ({"tp": 4, "cp": 2, "ep": 2, "pp": 2}, (4, 4)),
    ],
)
def test_every_stage_holds_each_shard_once_per_copy(
    sizes: dict[str, int], shards: tuple[int, int], of_expert: bool
) -> None:
    topology = Topology(**sizes)
    row = Parameter("experts.{expert}.weight" if of_expert else "layers.{layer}.weight")
    split = LayerSplit.of(topology.pp, topology.pp)
    found: defaultdict[tuple[int, int], Counter] = defaultdict(Counter)
    for rank in range(topology.world_size):
        place = Placement(topology, topology.coords(rank), split)
        shard, copy = place.shard_of(row), place.copy_of(row)
        assert shard.size == shards[of_expert]
        # Different experts are no copies of each other: each expert rank has its own.
        own = topology.expert_coords(rank).ep if of_expert else 0
        found[place.coords.pp, own][(*shard, *copy)] += 1
    experts = topology.ep if of_expert else 1
    assert len(found) == topology.pp * experts
    copies = topology.world_size // topology.pp // experts // shards[of_expert]
    wanted = {
        (rank, shards[of_expert], number, copies): 1
        for rank in range(shards[of_expert])
        for number in range(copies)
    }
    assert all(counted == wanted for counted in found.values())


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_the_chunks_of_all_stages_share_out_the_model(pp: int, vpp: int) -> None:
    topology = Topology(tp=2, dp=2, pp=pp, vpp=vpp)
    split = LayerSplit.of(16, pp, vpp)
    places = [Placement(topology, topology.coords(r), split) for r in range(topology.world_size)]
    one_replica = [p for p in places if p.coords.tp == p.coords.dp == 0]
    chunks = [(place, chunk) for place in one_replica for chunk in range(vpp)]
    layers = sorted(layer for place, chunk in chunks for layer in place.layers(chunk))
    assert layers == list(range(16))
    (first,) = [(p, c) for p, c in chunks if p.holds_embedding(c)]
    (last,) = [(p, c) for p, c in chunks if p.holds_head(c)]
    assert 0 in first[0].layers(first[1]) and 15 in last[0].layers(last[1])
