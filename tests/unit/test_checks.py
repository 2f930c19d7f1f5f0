"""What is refused before it is computed with: here the prompts; batches are tried on ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from megatron_policy.train.checks import checked_prompts

PROMPTS = torch.ones(3, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_lengths": torch.tensor([1])}, "lack a tensor 'input_ids'"),
        ({"input_ids": PROMPTS}, "lack a tensor 'input_lengths'"),
        ({"input_ids": PROMPTS, "input_lengths": [1, 2, 3]}, "lack a tensor 'input_lengths'"),
        ({"input_ids": PROMPTS[0], "input_lengths": torch.tensor([1])}, "must be"),
        ({"input_ids": PROMPTS, "input_lengths": torch.ones(3)}, "float32"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 2])}, "must be"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 0, 1])}, "has 0 in row 1"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([4, 4, 5])}, "5 in row 2.* 1 and 4"),
    ],
)
def test_what_cannot_be_continued_is_named(data: dict[str, object], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        checked_prompts(BatchedDataDict(data), vocab_size=9, max_length=5)


def test_prompts_of_every_length_that_leaves_room_pass() -> None:
    data = BatchedDataDict({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 4, 6])})
    tokens, lengths = checked_prompts(data, vocab_size=9, max_length=7)
    assert torch.equal(tokens, PROMPTS) and lengths.tolist() == [1, 4, 6]
