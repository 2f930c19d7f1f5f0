"""A plan names every row once, goes over the host's attributes and back, and keeps ranks even."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.batching import batching_of
from megatron_policy.errors import BatchError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.multiples import NARROWEST, Multiples
from megatron_policy.packing.plan import MicrobatchSpan, Plan, RankPlan, consecutive, plan_rows
from megatron_policy.packing.tokens import packed_layout, padded_layout
from tests.pure.test_config import minimal
from tests.pure.test_rows import model

COST = sequence_cost(model(hidden_size=8, ffn_hidden_size=24))
SEEING = replace(COST, patch=0.5)
PACKED = Batching("packed", 64)
DYNAMIC = Batching("dynamic", 64, 8)
SETTINGS = [
    PACKED,
    Batching("packed", 64, 4, "first_fit_decreasing"),
    Batching("packed", 64, 1, "concatenative"),
    DYNAMIC,
]
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


def spans_of(share: RankPlan) -> list[tuple[MicrobatchSpan, list[int]]]:
    (spans,) = share.plan.batches
    return [(span, list(share.rows[span.start : span.end])) for span in spans]


@pytest.mark.parametrize("settings", SETTINGS)
@given(lengths=LENGTHS, ranks=st.integers(1, 4), multiple=st.integers(1, 3))
def test_ranks_share_the_rows_in_equally_many_microbatches_that_hold_them(
    settings: Batching, lengths: list[int], ranks: int, multiple: int
) -> None:
    shares = plan_rows(lengths, settings, ranks, multiple, COST)
    assert sorted(row for share in shares for row in share.rows) == list(range(len(lengths)))
    (count,) = {len(spans_of(share)) for share in shares}
    assert count % multiple == 0
    for span, rows in (each for share in shares for each in spans_of(share)):
        sizes = [-(-lengths[row] // settings.round_to) * settings.round_to for row in rows]
        computed = sum(sizes) if settings.kind == "packed" else len(rows) * max(sizes, default=0)
        assert computed <= settings.tokens
        assert span.length == (sum(sizes) if settings.kind == "packed" else max(sizes, default=0))


@given(lengths=st.lists(st.integers(1, 8), min_size=64, max_size=128), ranks=st.integers(1, 4))
def test_the_costliest_rank_is_within_a_hundredth_of_the_mean_of_many_short_rows(
    lengths: list[int], ranks: int
) -> None:
    shares = plan_rows(lengths, PACKED, ranks, 1, COST)
    costs = [sum(COST(lengths[row]) for row in share.rows) for share in shares]
    assert max(costs) <= 1.01 * sum(costs) / ranks + 0.5 * COST(1)


def test_a_long_row_is_made_up_for_by_the_other_bins_of_its_rank() -> None:
    # Bins alone cannot be even: 48 tokens of one row cost more than 64 of many.
    lengths = [48] + [4] * 40
    shares = plan_rows(lengths, PACKED, 2, 1, COST)
    costs = [sum(COST(lengths[row]) for row in share.rows) for share in shares]
    assert max(costs) <= min(costs) + COST(4)


@given(lengths=LENGTHS, ranks=st.integers(1, 3))
def test_every_rank_computes_its_costliest_microbatch_first(lengths: list[int], ranks: int) -> None:
    for share in plan_rows(lengths, PACKED, ranks, 1, COST):
        costs = [sum(COST(lengths[row]) for row in rows) for _, rows in spans_of(share)]
        assert costs == sorted(costs, reverse=True)


def test_a_batch_of_fewer_rows_than_ranks_leaves_ranks_with_empty_microbatches() -> None:
    shares = plan_rows([5, 3], PACKED, 4, 1, COST)
    assert sorted(share.rows for share in shares) == [(), (), (0,), (1,)]
    assert [share.plan.batches[0][0] for share in shares if not share.rows] == [
        MicrobatchSpan(0, 0, 0)
    ] * 2


@pytest.mark.parametrize("settings", SETTINGS)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=20),
    group=st.integers(2, 3),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
)
def test_rows_of_a_group_share_a_microbatch_in_their_order(
    settings: Batching, lengths: list[int], group: int, ranks: int, multiple: int
) -> None:
    lengths = lengths[: len(lengths) // group * group] or [1] * group
    settings = replace(settings, rows_per_group=group, tokens=72)
    shares = plan_rows(lengths, settings, ranks, multiple, COST)
    assert sorted(row for share in shares for row in share.rows) == list(range(len(lengths)))
    (count,) = {len(spans_of(share)) for share in shares}
    assert count % multiple == 0
    for span, rows in (each for share in shares for each in spans_of(share)):
        firsts = rows[::group]
        assert rows == [row for first in firsts for row in range(first, first + group)]
        assert all(first % group == 0 for first in firsts)
        sizes = [settings.size(lengths[row]) for row in rows]
        computed = sum(sizes) if settings.kind == "packed" else len(rows) * max(sizes, default=0)
        assert computed <= settings.tokens
        assert span.length == (sum(sizes) if settings.kind == "packed" else max(sizes, default=0))


@given(st.lists(st.integers(1, 8), min_size=64, max_size=128), st.integers(1, 4))
def test_ranks_cost_the_same_within_a_fiftieth_where_short_rows_are_in_pairs(
    lengths: list[int], ranks: int
) -> None:
    lengths = lengths[: len(lengths) // 2 * 2]
    shares = plan_rows(lengths, replace(PACKED, rows_per_group=2), ranks, 1, COST)
    costs = [sum(COST(lengths[row]) for row in share.rows) for share in shares]
    assert max(costs) <= 1.02 * sum(costs) / ranks + COST(1)


@pytest.mark.parametrize(
    ("settings", "lengths", "message"),
    [
        (PACKED, [30, 34, 33, 32], "rows 2 to 3, .* take 65 tokens .*, more than tokens=64: raise"),
        (DYNAMIC, [24, 32, 33, 1], "rows 2 to 3, .* take 80 tokens .*, more than tokens=64: raise"),
        (PACKED, [65, 1], "row 0 has 65 tokens"),
        (DYNAMIC, [1, 1, 1], "a batch of 3 rows cuts a group of 2 rows.*make it a multiple of 2"),
    ],
)
def test_a_group_that_no_microbatch_holds_is_named(
    settings: Batching, lengths: list[int], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        plan_rows(lengths, replace(settings, rows_per_group=2), 1, 1, COST)


@pytest.mark.parametrize("settings", SETTINGS)
@given(
    rows=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 30)), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
)
def test_pictures_of_a_microbatch_have_no_more_patches_than_allowed(
    settings: Batching, rows: list[tuple[int, int]], ranks: int
) -> None:
    lengths, patches = zip(*rows, strict=True)
    shares = plan_rows(lengths, replace(settings, patches=30), ranks, 1, SEEING, patches=patches)
    assert sorted(row for share in shares for row in share.rows) == list(range(len(lengths)))
    for _, own in (each for share in shares for each in spans_of(share)):
        assert sum(patches[row] for row in own) <= 30


@pytest.mark.parametrize("settings", [PACKED, DYNAMIC])
def test_ranks_share_pictures_out_as_they_share_tokens(settings: Batching) -> None:
    """All rows are equally long, and every fourth one has a picture."""
    patches = [40, 0, 0, 0] * 8
    shares = plan_rows([8] * 32, settings, 2, 1, SEEING, patches=patches)
    assert [sum(patches[row] for row in share.rows) for share in shares] == [160, 160]


def test_a_row_with_too_many_patches_is_named() -> None:
    for settings in (PACKED, DYNAMIC, Batching("padded")):
        alone = r"of row 1 alone have 31 patches, more than max.*=30: raise it, or make pictures sm"
        with pytest.raises(BatchError, match=alone + "aller$"):
            replace(settings, patches=30).check([8, 8], patches=[30, 31])
    together = "of rows 0, 1, which make one microbatch, .* or put fewer rows into a microbatch"
    with pytest.raises(BatchError, match=together):
        replace(PACKED, patches=30).check_patches([0, 1], [20, 20])


def test_a_row_that_is_too_long_is_named_with_its_key() -> None:
    settings = Batching("packed", 64, 4, key="sequence_packing.logprob_mb_tokens")
    with pytest.raises(BatchError, match=r"row 1 has 65 tokens \(68 .*logprob_mb_tokens=64"):
        plan_rows([64, 65], settings, 1, 1, COST)
    with pytest.raises(BatchError, match=r"row 0 has 61 tokens \(64 with padding\)"):
        plan_rows([61], Batching("dynamic", 62, 8), 1, 1, COST)
    (share,) = plan_rows([61], Batching("dynamic", 62, 8), 1, 1, COST, width=61)
    assert share.plan.batches == ((MicrobatchSpan(0, 1, 61),),)


@pytest.mark.parametrize("settings", [PACKED, DYNAMIC])
@given(batches=st.lists(LENGTHS, min_size=1, max_size=3))
def test_a_plan_survives_the_hosts_attributes_and_pickling(
    settings: Batching, batches: list[list[int]]
) -> None:
    shares = [plan_rows(lengths, settings, 1, 1, COST)[0] for lengths in batches]
    plan = consecutive([share.plan for share in shares])
    lengths = [each[row] for each, share in zip(batches, shares, strict=True) for row in share.rows]
    data = BatchedDataDict({"input_lengths": torch.tensor(lengths)})
    plan.attach(data)
    data = pickle.loads(pickle.dumps(data))
    assert Plan.of(data) == plan
    assert plan.rows == tuple(len(each) for each in batches)
    assert (data.elem_counts_per_gb is None) == (settings.kind == "dynamic")
    if plan.packed:
        parts = [Plan.of(data.get_batch(number)) for number in range(len(batches))]
        assert parts == [share.plan for share in shares]


def host(rows: int, **attributes: Any) -> BatchedDataDict:
    """A batch as the host's driver sends it to a worker."""
    data = BatchedDataDict({"input_lengths": torch.full((rows,), 3)})
    for name, value in attributes.items():
        setattr(data, name, value)
    return data


def test_a_plan_of_the_host_is_read_as_it_is() -> None:
    packed = host(
        5,
        micro_batch_indices=[[[0, 2], [2, 3]], [[0, 2]]],
        micro_batch_lengths=[[8, 4], [8]],
        elem_counts_per_gb=[3, 2],
    )
    assert Plan.of(packed) == Plan(
        ((MicrobatchSpan(0, 2, 8), MicrobatchSpan(2, 3, 4)), (MicrobatchSpan(0, 2, 8),)),
        packed=True,
    )
    dynamic = host(4, micro_batch_indices=[[[0, 1], [1, 4]]], micro_batch_lengths=[[8, 4]])
    assert Plan.of(dynamic) == Plan(
        ((MicrobatchSpan(0, 1, 8), MicrobatchSpan(1, 4, 4)),), packed=False
    )
    assert Plan.of(host(4)) is None


@pytest.mark.parametrize(
    ("indices", "lengths", "counts", "message"),
    [
        ([[[0, 2], [3, 4]]], [[8, 8]], None, r"after 2 rows comes \[3, 4\)"),
        ([[[0, 2], [1, 4]]], [[8, 8]], None, r"after 2 rows comes \[1, 4\)"),
        ([[[1, 4]]], [[9]], None, r"after 0 rows comes \[1, 4\)"),
        ([[[0, 3], [3, 2], [2, 4]]], [[9, 9, 9]], None, r"after 3 rows comes \[3, 2\)"),
        ([[[0, 3]]], [[9]], None, r"have \[3\] rows, .* the data have 4 rows"),
        ([[[0, 2]], [[0, 2]]], [[9], [9]], [3, 1], r"elem_counts_per_gb are \[3, 1\]"),
        ([[[0, 4]]], None, None, "do not match micro_batch_indices"),
        ([[[0, 2], [2, 4]]], [[9]], None, "do not match micro_batch_indices"),
        ([[[0, 2], [2, 4]]], [[3, 2]], None, "rows 2 to 3 need 3 positions.* has 2"),
        ([[[0, 1]], [[0, 3]]], [[3], [8]], [1, 3], "rows 1 to 3 need 9 positions.* has 8"),
        ([[[0, 1, 2]]], [[4]], None, "micro_batch_indices"),
        ([[0, 4]], [[4]], None, "micro_batch_indices"),
        ([[["a", 4]]], [[4]], None, "micro_batch_indices"),
        (7, [[4]], None, "micro_batch_indices"),
    ],
)
def test_a_plan_of_another_form_or_without_every_row_once_is_refused(
    indices: Any, lengths: Any, counts: Any, message: str
) -> None:
    names = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
    with pytest.raises(BatchError, match=message):
        Plan.of(host(4, **dict(zip(names, (indices, lengths, counts), strict=True))))


def batching(training: bool = True, cp: int = 1, **sections: Any) -> Batching:
    keys = {"make_sequence_length_divisible_by": 16, "megatron_cfg.context_parallel_size": cp}
    return batching_of(PolicyConfig.parse(minimal(**keys, **sections)), training)


def test_batching_is_what_the_configuration_asks_for() -> None:
    tokens = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 128}
    assert batching() == Batching("padded")
    packed = batching(sequence_packing=tokens | {"algorithm": "concatenative"})
    key = "sequence_packing.train_mb_tokens"
    assert packed == Batching("packed", 64, 1, "concatenative", key, 16)
    read = batching(training=False, cp=2, sequence_packing=tokens)
    assert read == Batching("packed", 128, 4, None, "sequence_packing.logprob_mb_tokens", 16)
    dynamic = batching(dynamic_batching=tokens)
    assert dynamic == Batching("dynamic", 64, 16, None, "dynamic_batching.train_mb_tokens", 16)
    rounded = batching(dynamic_batching=tokens | {"sequence_length_round": 24}, training=False)
    assert rounded == Batching("dynamic", 128, 48, None, "dynamic_batching.logprob_mb_tokens", 16)


@given(lengths=LENGTHS.filter(bool), round_to=st.sampled_from([1, 4, 6]), row=st.integers(1, 8))
def test_no_microbatch_computes_more_positions_than_its_budget(
    lengths: list[int], round_to: int, row: int
) -> None:
    """As the layouts lay them out, all padding counted in."""
    width, tokens = max(lengths), 2 * max(lengths) + 40
    multiples = Multiples(row=row * round_to, sequence=round_to, context_ranks=1)
    for kind in ("dynamic", "packed"):
        settings = Batching(kind, tokens, round_to * (row if kind == "dynamic" else 1))
        settings = replace(settings, row_multiple=multiples.row)
        (share,) = plan_rows(lengths, settings, 1, 1, COST, width)
        ordered = [lengths[number] for number in share.rows]
        for span in share.plan.batches[0]:
            own = ordered[span.start : span.end]
            if kind == "packed":
                layout = packed_layout(own, width, multiples.sequence, multiples.row, 1)
            else:
                wide = max(min(span.length, width), min(NARROWEST, width))
                layout = padded_layout(len(own), wide, multiples.row, 1)
            assert layout.sources_CTR.numel() <= tokens, (kind, own)
