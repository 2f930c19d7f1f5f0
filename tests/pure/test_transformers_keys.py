"""Keys that users of transformers pass with a batch: used, or refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from megatron_policy.interfaces import LossInputType
from megatron_policy.training.checks import check_batch, check_loss_inputs, check_prompts
from tests.losses import LogitEntropy, SequenceNLL

VOCAB = 9
TOKENS = torch.arange(18).view(3, 6) % VOCAB
MASK = (torch.arange(6) < torch.tensor([[2], [6], [3]])).long()
LENGTHS = torch.tensor([2, 6, 3])
NUMBERED = torch.arange(6).expand(3, 6)


def checked(**given: Any) -> BatchedDataDict:
    return check_batch(BatchedDataDict(input_ids=TOKENS, **given), VOCAB)


def changed(values: torch.Tensor, row: int, position: int, value: float) -> torch.Tensor:
    values = values.clone()
    values[row, position] = value
    return values


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32]
)
def test_a_right_padded_attention_mask_gives_the_lengths(dtype: torch.dtype) -> None:
    mask = MASK.to(dtype)
    for given in ({}, {"input_lengths": LENGTHS.int()}):
        assert torch.equal(checked(attention_mask=mask, **given)["input_lengths"], LENGTHS)
    prompts = BatchedDataDict(input_ids=TOKENS, attention_mask=mask)
    found = check_prompts(prompts, VOCAB, max_length=7)
    assert torch.equal(found["input_lengths"], LENGTHS)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MASK.flip(1), r"leaves out position 0 of row 0, .*padding_side = 'right'"),
        (changed(MASK, 1, 4, 0), r"leaves out position 4 of row 1"),
        (changed(MASK, 2, 5, 1), r"leaves out position 3 of row 2"),
        (changed(changed(MASK, 0, 0, 0), 0, 1, 0), r"leaves out all of row 0"),
        (changed(MASK, 1, 2, 2), r"has 2 in row 1 at position 2"),
        (changed(MASK.float(), 1, 2, float("nan")), r"has nan in row 1 at position 2"),
        (MASK.float() - 1, r"has -1.0 in row 0 at position 2"),
        (MASK[:, :5], r"shape \(3, 5\): pass one number for each token, \[3, 6\]"),
        (MASK[:, None, None].expand(3, 1, 6, 6), r"shape \(3, 1, 6, 6\)"),
        ([[1] * 6] * 3, r"is list"),
    ],
)
def test_every_other_attention_mask_is_refused_by_row(mask: Any, message: str) -> None:
    with pytest.raises(BatchError, match=f"attention_mask.*{message}"):
        checked(attention_mask=mask)


def test_a_mask_that_contradicts_the_lengths_is_refused_by_row() -> None:
    with pytest.raises(BatchError, match="has 6 tokens in row 1, whose input_lengths is 5"):
        checked(attention_mask=MASK, input_lengths=torch.tensor([2, 5, 3]))


def test_usual_positions_and_types_pass_whatever_padding_has() -> None:
    padded = NUMBERED.masked_fill(MASK == 0, 1)  # transformers' own numbers of padding
    types = torch.zeros(3, 6, dtype=torch.long).masked_fill(MASK == 0, 1)
    checked(attention_mask=MASK, position_ids=padded, token_type_ids=types)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": changed(NUMBERED, 2, 1, 5)}, "position_ids has 5 in row 2 at position 1"),
        ({"position_ids": NUMBERED.expand(3, 3, 6)}, r"'position_ids' is torch.int64 of shape"),
        ({"position_ids": NUMBERED.float()}, r"'position_ids' is torch.float32"),
        ({"token_type_ids": changed(0 * TOKENS, 1, 3, 1)}, "has 1 in row 1 at position 3"),
        ({"inputs_embeds": torch.ones(3, 6, 4)}, "'inputs_embeds', which is not read"),
        ({"past_key_values": ((TOKENS,),)}, "'past_key_values', which is not read"),
        (
            {"pixel_values": torch.ones(3, 2)},
            "'pixel_values', which is not read: this model reads text alone. Leave it out",
        ),
        *(
            ({key: [None] * 3}, f"'{key}', which is not read: this model reads text alone")
            for key in ("image_grid_thw", "image_sizes", "sound_clips", "pixel_attention_mask")
        ),
    ],
)
def test_what_a_model_would_not_compute_with_is_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        checked(**given)


def check_labels(labels: Any, loss: Any = None, **given: Any) -> None:
    mask = {"token_mask": MASK, "sample_mask": torch.tensor([1.0, 1.0, 1.0])} | given
    data = checked(attention_mask=MASK, labels=labels, **mask)
    check_loss_inputs(loss or SequenceNLL(), data, VOCAB)


def test_labels_of_the_tokens_that_count_pass() -> None:
    check_labels(TOKENS.masked_fill(MASK == 0, -100))
    prompts = TOKENS.masked_fill(MASK == 0, -100).masked_fill(NUMBERED < 1, -100)
    check_labels(prompts)  # position 0 predicts nothing
    check_labels(torch.tensor([1, 0, 1]))  # of rows: the loss's own
    check_labels(changed(TOKENS, 1, 2, -100), token_mask=changed(MASK, 1, 2, 0))
    check_labels(changed(TOKENS, 1, 2, -100), sample_mask=torch.tensor([1.0, 0.0, 1.0]))


def test_labels_that_leave_out_what_counts_are_refused() -> None:
    with pytest.raises(BatchError, match=r"leave out position 2 of row 1.*token_mask=\(labels"):
        check_labels(changed(TOKENS, 1, 2, -100))


def test_labels_of_other_tokens_are_refused_where_the_loss_has_no_logits() -> None:
    other = changed(TOKENS, 1, 2, 0)
    with pytest.raises(BatchError, match="labels have 0 in row 1 at position 2, where input_ids"):
        check_labels(other)
    assert LogitEntropy.input_type is LossInputType.LOGIT
    check_labels(other, LogitEntropy())


@pytest.mark.parametrize("foreign", [-100, VOCAB, 2**40])
@pytest.mark.parametrize("key", ["input_lengths", "attention_mask"])
def test_any_id_may_stand_behind_a_row_s_end(foreign: int, key: str) -> None:
    tokens = TOKENS.masked_fill(MASK == 0, foreign)
    given = {"input_lengths": LENGTHS, "attention_mask": MASK}[key]
    found = check_batch(BatchedDataDict({"input_ids": tokens, key: given}), VOCAB)
    assert torch.equal(found["input_ids"], TOKENS * MASK)
    with pytest.raises(BatchError, match=rf"{foreign} in row 0 at position 2.*pass input_lengths"):
        check_batch(BatchedDataDict(input_ids=tokens), VOCAB)
    inside = changed(tokens, 2, 1, VOCAB)
    with pytest.raises(BatchError, match=f"token {VOCAB} in row 2 at position 1"):
        check_batch(BatchedDataDict({"input_ids": inside, key: given}), VOCAB)


def test_arrays_are_taken_as_tensors_are() -> None:
    given = {"input_ids": TOKENS, "attention_mask": MASK, "weights": torch.ones(3, 6)}
    for data in (given, {key: value.numpy() for key, value in given.items()}):
        found = check_batch(data, VOCAB)
        assert torch.equal(found["input_lengths"], LENGTHS)
        assert torch.equal(found["weights"], given["weights"])
    backwards = np.asarray(TOKENS.numpy()[:, ::-1], dtype=">i4")
    backwards.flags.writeable = False
    found = BatchedDataDict(input_ids=backwards, names=np.array(["a", "b", "c"]))
    assert torch.equal(found["input_ids"], TOKENS.flip(1).int())
    assert found["names"] == ["a", "b", "c"]
