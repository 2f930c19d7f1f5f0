"""Rows stay together and in order through every way of cutting, dealing and joining them."""

from __future__ import annotations

import pickle
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.batch import BatchedDataDict


def batch(rows: int, width: int = 3, first: int = 0) -> BatchedDataDict:
    """Row i holds i + `first` everywhere: in a matrix, a vector, a cube and a list."""
    at = torch.arange(first, first + rows)
    return BatchedDataDict(
        {
            "ids": at[:, None].expand(rows, width).clone(),
            "lengths": at.clone(),
            "topk": at[:, None, None].expand(rows, width, 2).clone(),
            "names": [str(i) for i in at.tolist()],
        }
    )


def order(data: BatchedDataDict) -> list[int]:
    """The rows that `data` holds; fails when a key disagrees with the others."""
    rows = [int(name) for name in data["names"]]
    for key in ("ids", "lengths", "topk"):
        assert data[key].reshape(len(rows), -1).float().mean(1).tolist() == rows
    return rows


def same(a: BatchedDataDict, b: BatchedDataDict) -> bool:
    """Whether two batches have equal keys and values."""
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        for key in a
    )


def test_size_is_the_common_number_of_rows_and_names_who_disagrees() -> None:
    assert batch(5).size == 5
    assert BatchedDataDict().size == 0
    data = batch(5)
    data["odd"] = [1, 2]
    with pytest.raises(ValueError, match="'ids' has 5 rows, but 'odd' has 2"):
        _ = data.size


def test_a_slice_shares_memory_keeps_the_rows_and_stays_inside() -> None:
    data = batch(6)
    part = data.slice(2, 4)
    assert order(part) == [2, 3]
    part["lengths"][0] = 99
    assert data["lengths"][2] == 99
    for start, end in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="6 rows"):
            data.slice(start, end)


def test_get_batch_and_microbatches_walk_through_all_rows() -> None:
    data = batch(6)
    assert order(data.get_batch(1, 2)) == [2, 3]
    assert [order(mb) for mb in data.make_microbatch_iterator(3)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="6 rows cannot be cut into microbatches of 4"):
        data.make_microbatch_iterator(4)


def test_chunks_are_equal_and_in_order() -> None:
    assert [order(batch(6).chunk(i, 3)) for i in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="shard 3 of 3 is out of range for 6 rows"):
        batch(6).chunk(3, 3)
    with pytest.raises(ValueError, match="6 rows cannot be cut into 4 equal shards"):
        batch(6).chunk(0, 4)


def test_without_a_batch_size_shards_are_consecutive_rows() -> None:
    parts = batch(8).shard_by_batch_size(2)
    assert [order(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(shards=st.integers(1, 4), share=st.integers(1, 3), groups=st.integers(1, 3))
def test_global_batch_i_is_what_the_shards_i_th_batches_make_together(
    shards: int, share: int, groups: int
) -> None:
    gbs = shards * share
    parts = batch(gbs * groups).shard_by_batch_size(shards, batch_size=gbs)
    for i in range(groups):
        together = [row for part in parts for row in order(part.get_batch(i, share))]
        assert together == list(range(i * gbs, (i + 1) * gbs))


@pytest.mark.parametrize(("shards", "size"), [(3, None), (2, 3), (4, 6), (2, 0)])
def test_rows_that_cannot_be_dealt_evenly_name_all_three_numbers(
    shards: int, size: int | None
) -> None:
    size_said = 8 if size is None else size
    with pytest.raises(ValueError, match=f"8 rows .* {shards} shards in groups of {size_said}"):
        batch(8).shard_by_batch_size(shards, batch_size=size)


@given(st.permutations(range(5)))
def test_reordering_undoes_a_selection(rows: list[int]) -> None:
    data = batch(5).select_indices(rows)
    assert order(data) == rows
    data.reorder_data(rows)
    assert order(data) == [0, 1, 2, 3, 4]


def test_a_selection_may_repeat_rows_and_count_from_the_end_and_an_order_loses_none() -> None:
    assert order(batch(3).select_indices(torch.tensor([2, 2, -3]))) == [2, 2, 0]
    with pytest.raises(ValueError, match="row 3 is not within the batch's 3 rows"):
        batch(3).select_indices([3])
    with pytest.raises(ValueError, match="must name each once"):
        batch(3).reorder_data([0, 0, 1])


def test_repeated_rows_stand_together_and_their_list_items_can_diverge() -> None:
    data = batch(2)
    data["log"] = [[0], [1]]
    repeated = data.repeat_interleave(2)
    assert order(repeated) == [0, 0, 1, 1]
    repeated["log"][0].append(7)
    assert repeated["log"] == [[0, 7], [0], [1], [1]]
    assert data["log"] == [[0], [1]]


def test_truncation_cuts_every_tensor_with_the_dimension_and_no_other() -> None:
    data = batch(2, width=4)
    data.truncate_tensors(dim=1, truncated_len=3)
    shapes = [tuple(data[key].shape) for key in ("ids", "topk", "lengths")]
    assert shapes == [(2, 3), (2, 3, 2), (2,)]
    with pytest.raises(ValueError, match="'ids' has 3 entries in dimension 1, fewer than 4"):
        data.truncate_tensors(dim=1, truncated_len=4)


def test_joined_batches_are_padded_on_the_right_with_the_value_of_their_key() -> None:
    joined = BatchedDataDict.from_batches(
        [batch(1, width=2), batch(1, width=3, first=1)], pad_value_dict={"ids": -1}
    )
    assert joined["ids"].tolist() == [[0, 0, -1], [1, 1, 1]]
    assert joined["topk"].tolist() == [[[0, 0], [0, 0], [0, 0]], [[1, 1], [1, 1], [1, 1]]]
    assert joined["lengths"].tolist() == [0, 1]
    assert joined["names"] == ["0", "1"]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_joining_undoes_cutting(sizes: list[int]) -> None:
    whole = batch(sum(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [whole.slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    assert same(BatchedDataDict.from_batches(parts), whole)


def test_joining_skips_batches_without_keys() -> None:
    assert BatchedDataDict.from_batches([]).size == 0
    assert order(BatchedDataDict.from_batches([{}, batch(2), BatchedDataDict()])) == [0, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.zeros(1, 2), "y": [1]}, r"batches 0 and 1 differ in their keys: \['y'\]"),
        ({"x": [1]}, "'x' is a tensor in some batches and a list in others"),
        (
            {"x": torch.zeros(1, 2, 2)},
            r"'x' has shapes that cannot be joined: \[\(1, 2\), \(1, 2, 2\)",
        ),
    ],
)
def test_batches_that_do_not_match_name_the_key(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchedDataDict.from_batches([{"x": torch.zeros(1, 2)}, other])


def test_dtypes_survive_dealing_and_joining() -> None:
    data = BatchedDataDict(
        {"mask": torch.tensor([[True], [False]]), "half": torch.ones(2, 1, dtype=torch.bfloat16)}
    )
    joined = BatchedDataDict.from_batches(data.shard_by_batch_size(2))
    assert (joined["mask"].dtype, joined["half"].dtype) == (torch.bool, torch.bfloat16)


def test_moving_changes_the_batch_itself_and_returns_it() -> None:
    data = batch(2)
    assert data.to("meta") is data
    assert data["ids"].device.type == "meta"
    assert data["names"] == ["0", "1"]


def planned() -> BatchedDataDict:
    """Two global batches of 3 and 2 rows, in microbatches of 2 and 1, and of 2 rows."""
    data = batch(5)
    data.micro_batch_indices = [[[0, 2], [2, 3]], [[0, 2]]]
    data.micro_batch_lengths = [[3, 2], [2]]
    data.elem_counts_per_gb = [3, 2]
    return data


PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")


def plan(data: BatchedDataDict) -> list[Any]:
    return [getattr(data, name) for name in PLAN]


def test_a_plan_comes_along_with_copies_pickles_and_batches_made_from_others() -> None:
    data = planned()
    pickled = pickle.loads(pickle.dumps(data))
    for other in (pickled, data.copy(), BatchedDataDict(data), data.to("cpu")):
        assert plan(other) == plan(data) != [None] * 3 and same(other, data)
    assert data.get_dict() is data.data
    host = UserDict(data.data)
    for name in PLAN:
        setattr(host, name, getattr(data, name))
    assert plan(BatchedDataDict(host)) == plan(data)
    assert plan(BatchedDataDict({"a": [1]})) == plan(batch(1)) == [None] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.slice(0, 5),
        lambda data: data.select_indices(range(5)),
        lambda data: data.repeat_interleave(1),
        lambda data: data.chunk(0, 1),
        lambda data: BatchedDataDict.from_batches([data]),
        lambda data: data.reorder_data(range(5)) or data,
    ],
)
def test_a_plan_is_gone_where_rows_were_cut_chosen_or_moved(change) -> None:
    assert plan(change(planned())) == [None] * 3


def test_a_global_batch_of_a_plan_carries_its_part_as_a_plan_of_one() -> None:
    parts = [planned().get_batch(0), planned().get_batch(1, batch_size=99)]
    assert [order(part) for part in parts] == [[0, 1, 2], [3, 4]]
    assert plan(parts[0]) == [[[[0, 2], [2, 3]]], [[3, 2]], [3]]
    assert plan(parts[1]) == [[[[0, 2]]], [[2]], [2]]


def test_without_counts_a_global_batch_has_the_size_asked_for() -> None:
    data = batch(4)
    data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2]], [[0, 1], [1, 2]]], [[3], [3, 1]]
    part = data.get_batch(1, 2)
    assert order(part) == [2, 3]
    assert plan(part) == [[[[0, 1], [1, 2]]], [[3, 1]], None]
    with pytest.raises(ValueError, match="needs its batch_size"):
        data.get_batch(1)


def test_planned_microbatches_are_cut_to_their_lengths_or_left_to_be_packed() -> None:
    part = planned().get_batch(0)
    assert part.get_microbatch_iterator_dynamic_shapes_len() == 2
    dynamic = list(part.make_microbatch_iterator_with_dynamic_shapes())
    assert [order(mb) for mb in dynamic] == [[0, 1], [2]]
    assert [tuple(mb["ids"].shape) for mb in dynamic] == [(2, 3), (1, 2)]
    assert part.get_microbatch_iterator_for_packable_sequences_len() == (2, 3)
    packable = list(part.make_microbatch_iterator_for_packable_sequences())
    assert [order(mb) for mb in packable] == [[0, 1], [2]]
    assert [tuple(mb["ids"].shape) for mb in packable] == [(2, 3), (1, 3)]


@pytest.mark.parametrize("data", [batch(2), planned()])
def test_microbatches_need_a_plan_of_one_global_batch(data: BatchedDataDict) -> None:
    with pytest.raises(ValueError, match=r"select one with get_batch\(\)"):
        next(data.make_microbatch_iterator_with_dynamic_shapes())
