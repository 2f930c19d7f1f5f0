"""Every sequence finds one bin, no bin overflows, and bins are as many and as equal as promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.converters.architecture import Shell
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.packing.balance import levelled
from megatron_policy.packing.bins import (
    concatenative,
    first_fit_decreasing,
    modified_first_fit_decreasing,
    pack,
    split_to,
)
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.dynamic import dynamic_bins
from tests.pure.test_rows import model

CAPACITY = 60
ALGORITHMS = [
    None,
    "balanced",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]
COST = sequence_cost(model(hidden_size=8, ffn_hidden_size=24))
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=40)


def costs_of(lengths: list[int]) -> list[float]:
    return [COST(length) for length in lengths]


def loads(bins: list[list[int]], lengths: list[int]) -> list[float]:
    return [sum(COST(lengths[row]) for row in members) for members in bins]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS, multiple=st.integers(1, 6))
def test_every_row_is_in_one_bin_none_overflows_and_the_count_is_a_multiple(
    algorithm: str | None, lengths: list[int], multiple: int
) -> None:
    bins = pack(lengths, CAPACITY, algorithm, multiple=multiple, costs=costs_of(lengths))
    assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in members) <= CAPACITY for members in bins)
    assert len(bins) % multiple == 0
    empty = sum(not members for members in bins)
    assert empty == max(len(bins) - len(lengths), 0)


@given(lengths=LENGTHS, multiple=st.integers(1, 6))
def test_every_row_is_in_one_dynamic_bin_that_holds_it_with_its_padding(
    lengths: list[int], multiple: int
) -> None:
    bins = dynamic_bins(lengths, CAPACITY, multiple, COST)
    assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
    assert len(bins) % multiple == 0
    assert sum(not members for members in bins) == max(len(bins) - len(lengths), 0)
    for members in filter(None, bins):
        assert len(members) * max(lengths[row] for row in members) <= CAPACITY


@given(LENGTHS.filter(bool))
def test_rows_of_a_dynamic_bin_are_neighbours_in_length(lengths: list[int]) -> None:
    bins = dynamic_bins(lengths, CAPACITY, 1, COST)
    spans = sorted((min(own), max(own)) for b in bins for own in [[lengths[row] for row in b]])
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_dynamic_bins_cost_about_the_same_where_rows_could_all_be_thrown_together() -> None:
    bins = dynamic_bins([10] * 12, 1000, 4, COST)
    assert [len(members) for members in bins] == [3, 3, 3, 3]


@given(LENGTHS.filter(bool))
def test_balanced_never_needs_more_bins_than_first_fit_decreasing(lengths: list[int]) -> None:
    ours = pack(lengths, CAPACITY, "balanced", costs=costs_of(lengths))
    assert len(ours) <= len(first_fit_decreasing(lengths, CAPACITY))


@given(st.lists(st.integers(1, 6), min_size=60, max_size=120), st.integers(1, 8))
def test_balanced_bins_of_many_short_rows_cost_the_same_within_a_twentieth(
    lengths: list[int], multiple: int
) -> None:
    costs = loads(pack(lengths, 10 * CAPACITY, multiple=multiple, costs=costs_of(lengths)), lengths)
    assert max(costs) <= 1.05 * sum(costs) / len(costs) + 0.5 * COST(1)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (concatenative, [[0, 1], [2, 3], [4]]),
        (first_fit_decreasing, [[3, 1], [0, 4], [2]]),
        (modified_first_fit_decreasing, [[3, 1], [0, 4], [2]]),
    ],
)
def test_the_classic_algorithms_fill_bins_in_their_order(algorithm, expected) -> None:
    assert algorithm([5, 4, 4, 6, 5], 10) == expected


def test_modified_first_fit_decreasing_pairs_short_rows_beside_long_ones() -> None:
    lengths = [58, 45, 31, 21, 21, 20]
    assert first_fit_decreasing(lengths, 100) == [[0, 2], [1, 3, 4], [5]]
    assert modified_first_fit_decreasing(lengths, 100) == [[0, 5, 3], [1, 2, 4]]


def test_names_of_algorithms_may_be_in_capitals_and_others_are_answered_with_all() -> None:
    assert pack([1, 2], 3, "FIRST_FIT_DECREASING", costs=[1, 2]) == [[1, 0]]
    with pytest.raises(ConfigError, match="'best_fit' is unknown: use one of balanced, conc"):
        pack([1], 3, "best_fit", costs=[1])


def test_a_row_longer_than_a_bin_is_named() -> None:
    with pytest.raises(BatchError, match="row 2 has 9 tokens, more than the 8 of a bin"):
        pack([1, 8, 9], 8, costs=[1, 8, 9])
    with pytest.raises(BatchError, match="row 1 has 128 tokens with its padding, more than the"):
        dynamic_bins([64, 128], 100, 1, COST)


def test_splitting_halves_the_costliest_bin_and_leaves_the_others() -> None:
    costs = [4.0, 3.0, 3.0, 1.0, 1.0]
    bins = split_to([[0, 1, 2], [3, 4]], 3, costs)
    assert sorted(map(sorted, bins)) == [[0], [1, 2], [3, 4]]
    assert sorted(map(sorted, split_to([[0, 1]], 4, costs))) == [[], [], [0], [1]]


def test_swaps_between_full_bins_even_out_what_owners_of_one_or_more_have() -> None:
    costs = [1.0, 1.0, 3.0, 3.0]
    bins = levelled([[0, 1], [2, 3]], [0, 1], [5, 5, 5, 5], costs, 10)
    assert [sum(costs[item] for item in members) for members in bins] == [4.0, 4.0]
    costs = [9.0, 1.0, 4.0, 4.0, 2.0]
    bins = levelled([[0], [4], [1], [2, 3]], [0, 0, 1, 1], [1] * 5, costs, 2)
    found = [sum(costs[item] for item in [*bins[a], *bins[a + 1]]) for a in (0, 2)]
    assert found == [10.0, 10.0]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3))
def test_exchanges_never_raise_the_largest_cost_or_overflow_a_bin(
    lengths: list[int], owners: int, each: int
) -> None:
    bins: list[list[int]] = [[] for _ in range(owners * each)]
    for row in range(len(lengths)):
        bins[row % len(bins)].append(row)
    capacity = max((sum(lengths[row] for row in members) for members in bins), default=0)
    who = [number % owners for number in range(len(bins))]

    def worst(of: list[list[int]]) -> float:
        found = [0.0] * owners
        for load, owner in zip(loads(of, lengths), who, strict=True):
            found[owner] += load
        return max(found)

    after = levelled(bins, who, lengths, [COST(length) for length in lengths], capacity)
    assert sorted(row for members in after for row in members) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in members) <= capacity for members in after)
    assert worst(after) <= worst(bins) * (1 + 1e-9)


def test_a_long_sequence_costs_more_than_its_parts_as_attention_is_quadratic() -> None:
    sizes = {"num_attention_heads": 2, "kv_channels": 50, "ffn_hidden_size": 400, "gated": False}
    cost = sequence_cost(model(hidden_size=100, **sizes))
    assert cost(600) == pytest.approx(600 * 2)
    assert cost(0) == 0


def test_a_patch_costs_what_the_matrices_of_the_towers_are_to_those_of_the_layers() -> None:
    sizes = {"num_attention_heads": 2, "kv_channels": 50, "ffn_hidden_size": 400, "gated": False}
    tensors = (("block.weight", (600, 100)), ("block.bias", (600,)))
    shell = Shell(tensors=tensors, prefix="", media=())
    cost = sequence_cost(model(hidden_size=100, shell=shell, **sizes))
    assert cost(10, 7) == pytest.approx(cost(10) + 7 * 60_000 / (2 * 120_000))
