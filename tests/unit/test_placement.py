"""A rank's place: every layer, the embedding and the head fall to exactly one chunk."""

from __future__ import annotations

import pytest

from megatron_policy.parallel.topology import LayerSplit, Placement, Topology


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
