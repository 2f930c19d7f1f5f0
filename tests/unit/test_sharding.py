"""How batches are dealt and answers joined, without any worker."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import RolloutMismatchConfig
from megatron_policy.converters.architecture import PatchMedium, Shell
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.plan import Plan
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.longest import Longest
from megatron_policy.training.replay import RouterReplay
from megatron_policy.training.sharding import (
    BatchDispatcher,
    joined,
    merged_training,
    shard_by_plan,
    shard_evenly,
    shard_for_training,
    shard_part,
)
from tests.losses import TokenNLL
from tests.pairwise import PairsOfLogprobs
from tests.pure.test_rows import model

COST = sequence_cost(model(hidden_size=8, ffn_hidden_size=24))
PADDED = Batching("padded")
PACKED = Batching("packed", 16, key="sequence_packing.train_mb_tokens")
DYNAMIC = Batching("dynamic", 16, 4)


def numbered(rows: int, length: int = 1) -> BatchedDataDict:
    ids = torch.arange(rows).unsqueeze(1).expand(rows, length).contiguous()
    return BatchedDataDict({"input_ids": ids, "names": [str(row) for row in range(rows)]})


def dealer_of(training: Batching) -> BatchDispatcher:
    limits, dense = Longest(64, 64), RouterReplay(False, 0, 0, (), 1)
    return BatchDispatcher(Topology(dp=2), 99, training, training, COST, limits, dense)


def test_the_driver_refuses_rollouts_only_where_they_are_compared() -> None:
    dealer = dealer_of(PADDED)
    data = numbered(4, 3) | {"input_lengths": torch.full((4,), 3), "sample_mask": torch.ones(4)}
    data["generation_logprobs"] = torch.zeros(4, 3, 2)
    with pytest.raises(BatchError, match=r"'generation_logprobs' is torch.float32 \(4, 3, 2\)"):
        dealer.to_train(data, TokenNLL(), 4, 1)
    dealer = replace(dealer, mismatch=RolloutMismatchConfig(enabled=False))
    assert sum(shard.size for shard in dealer.to_train(data, TokenNLL(), 4, 1)) == 4


@pytest.mark.parametrize("training", [PADDED, PACKED, DYNAMIC])
def test_the_driver_refuses_sizes_and_plans_that_cannot_be_dealt(training: Batching) -> None:
    dealer = dealer_of(training)
    data = numbered(4, 3) | {"input_lengths": torch.full((4,), 3), "sample_mask": torch.ones(4)}
    for sizes, message in (((-4, 1), "gbs is -4"), ((4, -1), "mbs is -1")):
        with pytest.raises(BatchError, match=message):
            dealer.to_train(data, TokenNLL(), *sizes)
    assert sum(shard.size for shard in dealer.to_train(data, TokenNLL(), 4, 1)) == 4
    data.micro_batch_indices = [[[0, 4]]]
    for deal in (lambda: dealer.to_train(data, TokenNLL(), 4, 1), lambda: dealer.to_score(data)):
        with pytest.raises(BatchError, match="pass the data without it"):
            deal()


def test_every_global_batch_is_dealt_evenly_in_order_and_without_the_rest_of_it() -> None:
    shards = shard_for_training(numbered(8), ranks=2, global_batch_size=4)
    assert [shard["input_ids"].flatten().tolist() for shard in shards] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    data = numbered(64, length=1000)
    whole = len(pickle.dumps(data))
    for shards in (shard_evenly(data, 8), shard_for_training(data, 8, 64)):
        assert all(len(pickle.dumps(shard)) < whole / 6 for shard in shards)


@pytest.mark.parametrize("training", [PADDED, PACKED, DYNAMIC])
def test_attachments_go_with_their_rows_and_without_those_of_others(training: Batching) -> None:
    dealer = replace(dealer_of(training), attachments=("features", "pictures"))
    data = numbered(8, 3) | {"input_lengths": torch.full((8,), 3), "sample_mask": torch.ones(8)}
    data["features"] = data["input_ids"][:, :1].float().repeat(1, 1000)
    data["pictures"] = [None if row % 3 else data["features"][row : row + 1] for row in range(8)]
    for shards in (dealer.to_train(data, TokenNLL(), 4, 1), dealer.to_score(data).shards):
        for shard in shards:
            for tokens, features, picture in zip(
                shard["input_ids"], shard["features"], shard["pictures"], strict=True
            ):
                row = int(tokens[0])
                assert features.shape == (1000,) and bool((features == row).all())
                assert picture is None if row % 3 else torch.equal(picture[0], features)
            assert len(pickle.dumps(shard)) < 2 * 4000 * (shard.size + 1)


def test_the_driver_names_the_row_whose_pictures_are_missing() -> None:
    shell = Shell((("tower", (1,)),), "", (PatchMedium(9, "pixels", 4, "grids", (5,)),))
    dealer = replace(dealer_of(PADDED), attachments=shell.attachments, shell=shell)
    data = numbered(8, 3) | {"input_lengths": torch.full((8,), 3), "sample_mask": torch.ones(8)}
    data["input_ids"][:, 0] = 9
    data["pixels"] = [None if row == 6 else torch.rand(4, 5) for row in range(8)]
    data["grids"] = [None if row == 6 else torch.tensor([[1, 2, 2]]) for row in range(8)]
    for deal in (
        lambda: dealer.to_score(data),
        lambda: dealer.to_generate(data),
        lambda: dealer.to_train(data, TokenNLL(), 8, 1),
        lambda: dealer.to_train_part(data, TokenNLL(), 1),
        lambda: dealer.to_dry_run(data, TokenNLL()),
    ):
        with pytest.raises(BatchError, match=r"row 6 has 1 tokens 9, 0 .* 'pixels' .* make 0"):
            deal()


def test_pixels_travel_once_for_all_rows_that_share_them_in_the_dtype_of_the_towers() -> None:
    shell = Shell((("tower", (1,)),), "", (PatchMedium(9, "pixels", 4, "grids", (1000,)),))
    dealer = replace(dealer_of(PADDED), attachments=shell.attachments, shell=shell)
    data = numbered(8, 3) | {"input_lengths": torch.full((8,), 3), "sample_mask": torch.ones(8)}
    data["input_ids"][:, 0], data["token_mask"] = 9, torch.tensor([[0, 1, 1]]).repeat(8, 1)
    data["pixels"] = [torch.rand(4, 1000)] * 8
    data["grids"] = [torch.tensor([[1, 2, 2]])] * 8
    for dtype in (torch.float32, torch.bfloat16):
        narrow = replace(dealer, dtype=dtype)
        for shard in (*narrow.to_train(data, TokenNLL(), 8, 1), *narrow.to_score(data).shards):
            assert len(pickle.dumps(shard)) < 4000 * dtype.itemsize + 4000
            for pixels in pickle.loads(pickle.dumps(shard))["pixels"]:
                assert torch.equal(pixels, data["pixels"][0].to(dtype))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))
def test_a_part_is_dealt_in_order_in_whole_microbatches_as_equal_as_can_be(
    microbatches: int, rows: int, ranks: int
) -> None:
    shards = shard_part(numbered(microbatches * rows), ranks, rows)
    assert [name for shard in shards for name in shard["names"]] == [
        str(row) for row in range(microbatches * rows)
    ]
    sizes = [shard.size // rows for shard in shards]
    assert [shard.size % rows for shard in shards] == [0] * ranks
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ConfigError, match="make them a multiple"):
        shard_part(numbered(rows + 1), ranks, rows + 2)


@pytest.mark.parametrize("rows", [1, 5, 6, 7])
def test_joining_undoes_dealing_whatever_the_number_of_rows(rows: int) -> None:
    data = numbered(rows)
    shards = shard_evenly(data, 3)
    assert len({shard.size for shard in shards}) == 1
    whole = joined(shards, rows)
    assert torch.equal(whole["input_ids"], data["input_ids"])
    assert whole["names"] == data["names"]


def test_answers_of_unequal_length_are_padded_as_their_key_asks() -> None:
    parts = [{"output_ids": torch.ones(1, 2)}, {"output_ids": torch.ones(2, 3)}]
    whole = joined(parts, 2, {"output_ids": 7})
    assert whole["output_ids"].tolist() == [[1, 1, 7], [1, 1, 1]]


def test_metrics_of_all_ranks_follow_one_another_and_the_slowest_gives_the_speed() -> None:
    common, speeds = {"loss": 1, "grad_norm": 2}, [{"seconds": 1.0}, {"seconds": 3.0}]
    results = [
        common | {"microbatch_metrics": {"a": [1, 2], "b": [3]}, "speed": speeds[0], "rank": 0},
        common | {"microbatch_metrics": {"a": [4]}, "speed": speeds[1], "rank": 1},
    ]
    merged = common | {"microbatch_metrics": {"a": [1, 2, 4], "b": [3]}, "speed": speeds[1]}
    assert merged_training(results) == merged


def uneven(lengths: list[int]) -> BatchedDataDict:
    """Row i holds i, and counts for `lengths[i]` positions."""
    data = numbered(len(lengths), length=16)
    data["input_lengths"] = torch.tensor(lengths)
    return data


@pytest.mark.parametrize("batching", [PACKED, DYNAMIC], ids=lambda batching: batching.kind)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=12),
    ranks=st.integers(1, 4),
    stages=st.integers(1, 2),
)
def test_planned_answers_come_back_in_the_callers_order_and_shape(
    batching: Batching, lengths: list[int], ranks: int, stages: int
) -> None:
    grid = Topology(dp=ranks, pp=stages, vpp=stages)
    data = uneven(lengths)
    dealt = shard_by_plan(data, lengths, batching, grid, COST)
    plans = [Plan.of(shard) for shard in dealt.shards]
    (count,) = {len(spans) for plan in plans if plan for spans in plan.batches}
    assert count % stages == 0
    assert all(shard.keys() == data.keys() for shard in dealt.shards)
    answers = [
        {"scores": shard["input_ids"].float(), "names": shard["names"]} for shard in dealt.shards
    ]
    whole = dealt.restored(answers)
    assert torch.equal(whole["scores"], data["input_ids"].float())
    assert whole["names"] == data["names"]


def test_global_batches_are_planned_one_by_one_and_follow_one_another() -> None:
    lengths = [16, 1, 2, 3, 16, 16]
    dealt = shard_by_plan(uneven(lengths), lengths, PACKED, Topology(dp=2), COST, 3)
    for number, rows in enumerate(({0, 1, 2}, {3, 4, 5})):
        parts = [shard.get_batch(number) for shard in dealt.shards]
        assert {int(row) for part in parts for row in part["input_ids"][:, 0]} == rows
        assert len({len(part.micro_batch_indices[0]) for part in parts}) == 1
        assert all(Plan.of(part) is not None for part in parts)


@pytest.mark.parametrize("training", [PADDED, PACKED, DYNAMIC])
def test_pairs_are_dealt_whole_and_what_would_cut_one_is_refused(training: Batching) -> None:
    dealer = dealer_of(training)
    lengths, loss = [2, 5, 7, 7, 7, 1, 3, 1], PairsOfLogprobs()
    data = uneven(lengths) | {"sample_mask": torch.ones(8)}
    deals = [dealer.to_train(data, loss, 8, 2), dealer.to_train_part(data, loss, 2)]
    for shards in deals:
        rows = [shard["input_ids"][:, 0].tolist() for shard in shards]
        assert sorted(row for own in rows for row in own) == list(range(8))
        pairs = [own[at : at + 2] for own in rows for at in range(0, len(own), 2)]
        assert all(first % 2 == 0 and second == first + 1 for first, second in pairs)
    single = TokenNLL()
    if training.kind != "padded":
        apart = [shard["input_ids"][:, 0].tolist() for shard in dealer.to_train(data, single, 8, 1)]
        assert apart != [shard["input_ids"][:, 0].tolist() for shard in deals[0]]
        with pytest.raises(BatchError, match="gbs=1 cuts a group of 2 rows"):
            dealer.to_train(data, loss, 1, 1)
        data["input_lengths"][2] = 10  # and 7
        with pytest.raises(BatchError, match=r"rows 2 to 3, .* take (17|24) tokens"):
            dealer.to_train(data, loss, 8, 2)
        return
    for deal in (dealer.to_train_part, lambda *args: dealer.to_train(*args[:2], 8, *args[2:])):
        with pytest.raises(BatchError, match=r"mbs=1 cuts a group of 2 rows.*multiple of 2"):
            deal(data, loss, 1)


def test_planned_data_are_whole_global_batches_and_an_idle_rank_gets_every_key() -> None:
    with pytest.raises(ConfigError, match="3 samples, which is not a multiple of gbs=2"):
        shard_by_plan(uneven([1, 1, 1]), [1, 1, 1], PACKED, Topology(), COST, 2)
    with pytest.raises(ConfigError, match="no rows"):
        shard_by_plan(BatchedDataDict(), [], PACKED, Topology(), COST)
    with pytest.raises(ConfigError, match="no rows"):
        shard_evenly(BatchedDataDict(), 2)
    with pytest.raises(BatchError, match=r"row 3 has 17 tokens, more than sequence_packing\.t"):
        shard_by_plan(uneven([1, 1, 1, 17]), [1, 1, 1, 17], PACKED, Topology(dp=2), COST, 2)
    dealt = shard_by_plan(uneven([5]), [5], PACKED, Topology(dp=2), COST)
    (empty,) = [shard for shard in dealt.shards if not shard.size]
    assert empty.keys() == uneven([5]).keys()
    assert (empty["input_ids"].shape, empty["names"]) == ((0, 16), [])
    assert empty.micro_batch_indices == [[[0, 0]]]
