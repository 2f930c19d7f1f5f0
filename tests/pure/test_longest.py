"""Rows that are longer than the configuration and the model allow are refused before anything is
computed; padding is not a part of a row's length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
)
from megatron_policy.errors import BatchError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.longest import Longest
from megatron_policy.training.replay import RouterReplay
from megatron_policy.training.sharding import BatchDispatcher
from tests.losses import TokenNLL
from tests.pure.test_config import minimal
from tests.pure.test_rows import model

PADDED = Batching("padded")


def rows(width: int, lengths: list[int] | None = None, count: int = 2) -> BatchedDataDict:
    data = BatchedDataDict(
        input_ids=torch.ones(count, width, dtype=torch.long), sample_mask=torch.ones(count)
    )
    if lengths is not None:
        data["input_lengths"] = torch.tensor(lengths)
    return data


def test_a_row_counts_by_its_length_whatever_it_is_padded_to() -> None:
    longest = Longest(configured=8, positions=100)
    longest.check(rows(64, [8, 3]))
    said = "row 1 has 9 tokens; at most max_total_sequence_length=8 and the model's 100 positions"
    with pytest.raises(BatchError, match=f"{said} are possible: .*or raise max_total_seq"):
        longest.check(rows(64, [8, 9]))


def test_rows_without_lengths_are_as_long_as_wide_less_what_hosts_pad() -> None:
    Longest(10, 100, multiple=8).check(rows(16))
    for longest, width in ((Longest(10, 100, multiple=8), 17), (Longest(10, 100), 11)):
        with pytest.raises(BatchError, match=f"row 0, like all others, has {width} tokens"):
            longest.check(rows(width))


def test_rows_beyond_the_models_positions_are_not_helped_by_the_configuration() -> None:
    longest = Longest(configured=4096, positions=12)
    longest.check(rows(12))
    with pytest.raises(BatchError, match=r"the model's 12 .*, or raise max_position_emb"):
        longest.check(rows(13))
    assert longest.tokens == 12 and Longest(8, 12).tokens == 8


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 64),
        (LinearScaling(2.5), 160),
        (DynamicScaling(2.0, 64), 128),
        (YarnScaling(4.0, 64, 32.0, 1.0, True, 1.0), 256),
        (YarnScaling(4.0, 16, 32.0, 1.0, True, 1.0), 64),
        (Llama3Scaling(8.0, 1.0, 4.0, 16), 64),
        (LongScaling((1.0, 1.0), (2.0, 2.0), 16, 1.0), 64),
    ],
)
def test_scaling_extends_the_positions_where_the_config_does_not_count_that_in(
    scaling: Any, positions: int
) -> None:
    config = PolicyConfig.parse(
        minimal(max_total_sequence_length=70, make_sequence_length_divisible_by=16)
    )
    found = Longest.of(config, model(kv_channels=4, rope=Rope(1e4, scaling)))
    assert found == Longest(70, positions, 16)


def test_the_driver_refuses_rows_that_are_too_long_whatever_is_done_with_them() -> None:
    limits = Longest(8, 100)
    dispatcher = BatchDispatcher(
        Topology(),
        9,
        PADDED,
        PADDED,
        sequence_cost(model(hidden_size=8, ffn_hidden_size=24)),
        limits,
        RouterReplay(False, 0, 0, (), 1),
    )
    fitting, long = rows(16, [8, 3]), rows(16, [3, 9])
    assert dispatcher.to_train(fitting, TokenNLL(), 2, 1) and dispatcher.to_score(fitting)
    for deal in (
        lambda: dispatcher.to_train(long, TokenNLL(), 2, 1),
        lambda: dispatcher.to_train_part(long, TokenNLL(), 1),
        lambda: dispatcher.to_score(long),
    ):
        with pytest.raises(BatchError, match="row 1 has 9 tokens; at most max_total_sequence_le"):
            deal()
    with pytest.raises(BatchError, match=r"input_lengths has 9 in row 1; .* at most 8 tokens"):
        dispatcher.to_generate(long)
