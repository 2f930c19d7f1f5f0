"""What a refit moves over the links of a machine: by hand for a few bytes, and counted move by move
for a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.links import NETWORK, NVLINK, LinkLoad, LinkTraffic, Machine
from megatron_policy.refit.planning import plan_refit
from megatron_policy.refit.shards import place_on_grid, plan_shards
from megatron_policy.refit.transports.collective.shards import order_engines
from tests.unit.test_refit_plan import model_of

PAIRS = {(0, 0): 10, (0, 1): 20, (1, 0): 5, (2, 1): 70, (2, 2): 40}
"""Of 3 trainers and 3 engine ranks."""


def test_an_engine_on_nodes_of_its_own_gets_all_over_the_network() -> None:
    # Nodes of 2: trainers 0 and 1, 2 alone, engine ranks 0 and 1, 2 alone.
    traffic = LinkTraffic(Machine(2, nvlink=1.0, network=10.0), 3, 3, PAIRS)
    assert traffic.totals == {NVLINK: 0, NETWORK: 145}
    assert traffic.busiest == {
        NETWORK: (
            LinkLoad("trainer rank 2", NETWORK, True, 110),
            LinkLoad("engine rank 1", NETWORK, False, 90),
        )
    }
    sender, receiver = traffic.busiest_nodes or ()
    assert sender == LinkLoad("node 1", NETWORK, True, 110)
    assert receiver == LinkLoad("node 2", NETWORK, False, 105)
    assert traffic.bottleneck.owner == "trainer rank 2"
    assert traffic.bound_time(traffic.bottleneck) == 11.0


@pytest.mark.parametrize(
    ("nvlink", "owner", "kind", "seconds"),
    [(100.0, "trainer rank 2", NETWORK, 11.0), (0.5, "engine rank 0", NVLINK, 30.0)],
)
def test_a_node_that_is_shared_uses_both_kinds_of_links(
    nvlink: float, owner: str, kind: str, seconds: float
) -> None:
    # Nodes of 4: all trainers and engine rank 0, engine ranks 1 and 2.
    traffic = LinkTraffic(Machine(4, nvlink, network=10.0, shared=True), 3, 3, PAIRS)
    assert traffic.totals == {NVLINK: 15, NETWORK: 130}
    assert traffic.busiest[NVLINK] == (
        LinkLoad("trainer rank 0", NVLINK, True, 10),
        LinkLoad("engine rank 0", NVLINK, False, 15),
    )
    assert traffic.busiest_nodes == (
        LinkLoad("node 0", NETWORK, True, 130),
        LinkLoad("node 1", NETWORK, False, 130),
    )
    assert (traffic.bottleneck.owner, traffic.bottleneck.kind) == (owner, kind)
    assert traffic.bound_time(traffic.bottleneck) == seconds


def test_a_refit_within_one_node_uses_no_network() -> None:
    traffic = LinkTraffic(Machine(8, 1.0, 1.0, shared=True), 3, 3, PAIRS)
    assert traffic.totals == {NVLINK: 145, NETWORK: 0}
    assert traffic.busiest_nodes is None and list(traffic.busiest) == [NVLINK]


@pytest.mark.parametrize(("shared", "offset"), [(False, 6), (True, 4)])
def test_links_of_a_plan_are_those_of_its_moves(checkpoint: Any, shared: bool, offset: int) -> None:
    """4 trainers and 4 engine ranks on nodes of 6, in bf16 and, as sent changes, of 1.5 bytes."""
    model, grid = model_of(checkpoint("qwen2"), tp=2, dp=2), Topology(tp=2, dp=2)
    plan, architecture = plan_refit(model, dtype=torch.bfloat16), model.table.architecture
    held = place_on_grid(plan, architecture, grid)
    shards = plan_shards(plan, architecture, model.topology, held, 4)
    moved = [
        (each.source, each.target, sum(math.prod(own.size) for own, _ in each.moves))
        for each in shards.transfers
    ]
    machine = Machine(6, 4.0, 1.0, shared)
    for pairs, size in (
        (shards.link_bytes, 2.0),
        (shards.scale_links({torch.bfloat16: 1.5}), 1.5),
    ):
        traffic = LinkTraffic(machine, 4, 4, pairs)
        over: Counter[tuple[str, str]] = Counter()
        for source, target, elements in moved:
            near = source // 6 == (offset + target) // 6
            kind = NVLINK if near else NETWORK
            for end in (f"trainer rank {source}", f"engine rank {target}"):
                over[end, kind] += elements
            if not near:
                over[f"node {source // 6}", "sent"] += elements
                over[f"node {(offset + target) // 6}", "received"] += elements
        for kind, links in traffic.busiest.items():
            for link, end in zip(links, ("trainer", "engine"), strict=True):
                of = {o: n for (o, k), n in over.items() if k == kind and o.startswith(end)}
                assert link.nbytes == size * max(of.values()) == size * of[link.owner]
                assert traffic.bound_time(traffic.bottleneck) >= traffic.bound_time(link)
            assert traffic.totals[kind] == size * sum(of.values())
        assert traffic.busiest_nodes is not None
        for link, direction in zip(traffic.busiest_nodes, ("sent", "received"), strict=True):
            of = {o: n for (o, k), n in over.items() if k == direction}
            assert link.nbytes == size * max(of.values()) == size * of[link.owner]
        assert sum(traffic.totals.values()) == size * sum(elements for *_, elements in moved)
        assert (traffic.totals[NVLINK] > 0) == shared
        used = {(source, target) for source, target, _ in moved}
        rounds = zip(*(order_engines(source, 4) for source in range(4)), strict=True)
        busy = [any(pair in used for pair in enumerate(targets)) for targets in rounds]
        assert traffic.rounds == sum(busy)
