"""How batches are dealt and answers joined, without any worker."""

from __future__ import annotations

import pickle

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import ConfigError
from megatron_policy.workers.sharding import even_shards, joined, merged_training, training_shards


def numbered(rows: int, length: int = 1) -> BatchedDataDict:
    ids = torch.arange(rows).unsqueeze(1).expand(rows, length).contiguous()
    return BatchedDataDict({"input_ids": ids, "names": [str(row) for row in range(rows)]})


def test_every_global_batch_is_dealt_evenly_and_in_order() -> None:
    shards = training_shards(numbered(8), ranks=2, global_batch_size=4, micro_batch_size=2)
    assert [shard["input_ids"].flatten().tolist() for shard in shards] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


@pytest.mark.parametrize("rows", [1, 5, 6, 7])
def test_joining_undoes_dealing_whatever_the_number_of_rows(rows: int) -> None:
    data = numbered(rows)
    shards = even_shards(data, 3)
    assert len({shard.size for shard in shards}) == 1
    whole = joined(shards, rows)
    assert torch.equal(whole["input_ids"], data["input_ids"])
    assert whole["names"] == data["names"]


def test_a_shard_does_not_carry_the_rest_of_the_batch_along() -> None:
    data = numbered(64, length=1000)
    whole = len(pickle.dumps(data))
    for shards in (even_shards(data, 8), training_shards(data, 8, 64, 8)):
        assert all(len(pickle.dumps(shard)) < whole / 6 for shard in shards)


def test_answers_of_unequal_length_are_padded_as_their_key_asks() -> None:
    parts = [{"output_ids": torch.ones(1, 2)}, {"output_ids": torch.ones(2, 3)}]
    whole = joined(parts, 2, {"output_ids": 7})
    assert whole["output_ids"].tolist() == [[1, 1, 7], [1, 1, 1]]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        even_shards(BatchedDataDict(), 2)


def test_metrics_of_all_ranks_follow_one_another() -> None:
    results = [
        {"global_loss": 1, "grad_norm": 2, "all_mb_metrics": {"a": [1, 2], "b": [3]}},
        {"global_loss": 1, "grad_norm": 2, "all_mb_metrics": {"a": [4]}},
    ]
    merged = {"loss": 1, "grad_norm": 2, "all_mb_metrics": {"a": [1, 2, 4], "b": [3]}}
    assert merged_training(results) == merged
