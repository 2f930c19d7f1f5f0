"""Rows longer than max_total_sequence_length or than the model's positions compute nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, policy_config
from tests.dist.layouts import SIZES, VOCAB

LONGEST = 32


def rows(longest: int, width: int) -> BatchedDataDict:
    data = oracle.make_batch(GLOBAL_BATCH, longest, VOCAB)
    for key in ("input_ids", "token_mask"):
        data[key] = torch.nn.functional.pad(data[key], (0, width - longest))
    return data


def refused(config: dict[str, Any], length: int) -> dict[str, Any]:
    """What is said of rows one token too long, and what is read of those that fit, padded wider."""
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        long, said = rows(length + 1, length + 8), []
        for call in (
            lambda: policy.train(long, LOSSES["token"](), mbs=1),
            lambda: policy.train(long, LOSSES["token"](), eval_mode=True, mbs=1),
            lambda: policy.logprobs(long),
            lambda: policy.topk_logits(long, 2),
            lambda: policy.logprobs(BatchedDataDict({"input_ids": long["input_ids"]})),
        ):
            with pytest.raises(BatchError) as raised:
                call()
            said.append(str(raised.value))
        same = all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        for wrong in (True, 1.0, -1):
            with pytest.raises(
                BatchError, match=f"scored at once, is {wrong}: pass a whole number"
            ):
                policy.logprobs(rows(length, length), micro_batch_size=wrong)
            with pytest.raises(BatchError, match=f"k is {wrong}; it must be a whole number"):
                policy.topk_logits(rows(length, length), wrong)
        fitting = policy.logprobs(rows(length, length + 8))[:, :length]
        alone = policy.logprobs(rows(length, length))
        return {"said": said, "same": same, "fitting": fitting, "alone": alone}


@pytest.mark.parametrize(("positions", "length"), [(512, LONGEST), (20, 20)])
def test_rows_that_are_too_long_are_refused_and_padding_is_not(
    ranks, checkpoint, positions: int, length: int
) -> None:
    path = checkpoint("qwen3", max_position=positions, **SIZES)
    (seen,) = ranks.run(1, refused, policy_config(path, {}), length)
    limits = f"max_total_sequence_length={LONGEST} and the model's {positions} positions"
    for message in seen["said"]:
        assert limits in message
    assert all(f"row 0 has {length + 1} tokens" in message for message in seen["said"][:-1])
    assert f"has {length + 8} tokens (there are no input_lengths)" in seen["said"][-1]
    assert seen["same"]
    torch.testing.assert_close(seen["fitting"], seen["alone"], rtol=0, atol=1e-6)
