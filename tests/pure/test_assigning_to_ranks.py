"""Ranks get equally many bins of equal cost, the costliest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.packing.lockstep import assign_to_ranks

COSTS = st.integers(1, 5).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.integers(0, 6).flatmap(
            lambda share: st.lists(
                st.floats(0.0, 100.0), min_size=ranks * share, max_size=ranks * share
            )
        ),
    )
)


@given(COSTS)
def test_every_rank_gets_equally_many_bins_from_the_costliest_to_the_cheapest(case) -> None:
    ranks, costs = case
    dealt = assign_to_ranks(costs, ranks)
    assert sorted(number for bins in dealt for number in bins) == list(range(len(costs)))
    assert {len(bins) for bins in dealt} == {len(costs) // ranks}
    for bins in dealt:
        assert [costs[b] for b in bins] == sorted((costs[b] for b in bins), reverse=True)


@given(COSTS)
def test_no_rank_exceeds_the_mean_by_more_than_the_costliest_bin(case) -> None:
    ranks, costs = case
    loads = [sum(costs[number] for number in bins) for bins in assign_to_ranks(costs, ranks)]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-6


def test_costs_that_can_be_equal_are() -> None:
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert [sum(costs[b] for b in bins) for bins in assign_to_ranks(costs, 4)] == [9.0] * 4
    # The costliest first makes 18 and 16 of these; a swap follows.
    costs = [9.0, 8.0, 6.0, 5.0, 4.0, 2.0]
    assert [sum(costs[b] for b in bins) for bins in assign_to_ranks(costs, 2)] == [17.0, 17.0]
