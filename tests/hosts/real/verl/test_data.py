"""verl's rows as a policy's batch: which tokens are read, and what is refused by verl's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from megatron_policy.errors import BatchError
from megatron_policy.hosts.verl.data import (
    MicroBatches,
    check_supported,
    count_tokens,
    count_valid,
    model_output,
    policy_batch,
    temperature_of,
)
from megatron_policy.training.callbacks import TokenScores
from tests.hosts.real.verl.rollouts import LENGTHS, jagged, rollouts, sft_rows

WIDTH = max(prompt + response for prompt, response in LENGTHS)


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_rollouts_are_read_where_their_responses_are(layout: str) -> None:
    rows = rollouts(0, layout)
    check_supported(rows)
    batch = policy_batch(rows)
    assert batch["input_ids"].shape == (8, WIDTH) and batch["sample_mask"].tolist() == [1.0] * 8
    for row, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        assert batch["input_lengths"][row] == length
        assert torch.equal(batch["input_ids"][row, :length], rows["input_ids"].unbind()[row])
        assert not batch["input_ids"][row, length:].any()
        # All of a response, also what a tool has answered in the middle of it.
        wanted = [0] * prompt + [1] * response + [0] * (WIDTH - length)
        assert batch["token_mask"][row].tolist() == wanted


def test_rows_of_supervised_training_are_read_where_they_count() -> None:
    rows = sft_rows(0)
    mask = policy_batch(rows)["token_mask"]
    assert torch.equal(mask, rows["loss_mask"].to_padded_tensor(0))
    assert count_tokens(rows) == sum(response for _, response in LENGTHS) == mask.sum()
    del rows["loss_mask"]
    assert policy_batch(rows)["token_mask"].sum() == sum(map(sum, LENGTHS))


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_tokens_of_tools_do_not_count_in_losses(layout: str) -> None:
    rows = rollouts(0, layout)
    counts = sum(response for _, response in LENGTHS) - 3
    assert count_tokens(rows) == count_valid(rows) == counts
    # verl rejects tokens of a rollout in this mask alone.
    rows["response_mask"] = rows["response_mask"] * 0
    assert (count_tokens(rows), count_valid(rows)) == (counts, 0)
    del rows["response_mask"]
    assert count_valid(rows) == counts


def test_temperatures_are_a_number_or_one_for_each_row() -> None:
    assert temperature_of(rollouts(0, "v1", temperature=0.7)) == 0.7
    assert temperature_of(rollouts(0, "v1")) is None
    rows, each = rollouts(0, "v1"), torch.linspace(0.5, 2.0, 8)
    rows["temperature"] = each
    found = temperature_of(rows)
    assert isinstance(found, torch.Tensor) and torch.equal(found, each.double())
    rows["temperature"] = each.unsqueeze(1)
    assert temperature_of(rows).shape == (8,)


def test_scores_become_jagged_rows_whose_last_place_is_zero_and_stay_differentiable() -> None:
    rows = rollouts(0, "v1")
    logprobs = torch.randn(8, WIDTH - 1, requires_grad=True)
    lengths = torch.tensor([sum(each) for each in LENGTHS])
    inside = torch.arange(1, WIDTH) < lengths.unsqueeze(1)  # scores are 0 beyond the text
    scores = TokenScores(policy_batch(rows), tuple(range(8)), logprobs=logprobs * inside)
    found = model_output(scores, rows)
    assert set(found) == {"log_probs"}
    for row, text in enumerate(found["log_probs"].unbind()):
        assert len(text) == lengths[row] and text[-1] == 0
        assert torch.equal(text[:-1], logprobs[row, : len(text) - 1])
    found["log_probs"].values().sum().backward()
    assert torch.equal(logprobs.grad, inside.float())


def test_microbatches_are_found_by_their_rows() -> None:
    parts = tu.chunk_tensordict(rollouts(0, "v1"), 4)
    in_order = MicroBatches.of(parts, None)
    assert [list(each) for each in in_order.rows] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mixed = MicroBatches.of(parts[:2], [[3, 0], [1, 2]])
    assert mixed.part((3, 0)) is parts[0] and mixed.part((1, 2)) is parts[1]


PIXELS, GRIDS = torch.rand(8, 3), torch.tensor([[1, 2, 4]])


def with_pictures(form: str) -> TensorDict:
    """Rows of which the second one has a picture, as verl's workers get them."""
    further = {"images_seqlens": GRIDS[0, :1], "token_type_ids": GRIDS}
    own = [{"pixel_values": PIXELS, "image_grid_thw": GRIDS, **further}]
    others: Any = {"pixel_values": None} if form == "none" else None if form == "missing" else {}
    rows = rollouts(0, "v1")
    media = [others, *own, *[others] * (len(LENGTHS) - 2)]
    positions = [torch.arange(n).repeat(4, 1) for n in map(sum, LENGTHS)]
    positions[1][1:] //= 2
    fields = {key: rows[key] for key in ("input_ids", "responses", "loss_mask")}
    fields["multi_modal_inputs"] = np.array(media, dtype=object) if form == "array" else media
    return tu.get_tensordict({**fields, "position_ids": jagged(positions)}, {})


@pytest.mark.parametrize("form", ["empty", "missing", "none", "array"])
def test_pictures_become_lists_with_an_entry_for_each_row(form: str) -> None:
    rows = with_pictures(form)
    for own, at in ((rows, 1), (tu.chunk_tensordict(rows, 4)[0], 1)):
        check_supported(own)
        batch = policy_batch(own)
        for key, value in (("pixel_values", PIXELS), ("image_grid_thw", GRIDS)):
            found = batch[key]
            assert len(found) == len(own) and torch.equal(found[at], value)
            assert all(each is None for row, each in enumerate(found) if row != at)
        assert not {"images_seqlens", "token_type_ids"} & batch.keys()
    assert "pixel_values" not in policy_batch(tu.chunk_tensordict(rows, 4)[1])


def as_one(rows: TensorDict) -> None:
    tu.assign_non_tensor(rows, multi_modal_inputs={"pixel_values": torch.zeros(1)})


def dense(rows: TensorDict) -> None:
    rows["input_ids"] = rows["input_ids"].to_padded_tensor(0)


def with_axes(rows: TensorDict) -> None:
    rows["position_ids"] = jagged([torch.arange(n).repeat(3, 1) // 2 for n in map(sum, LENGTHS)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (as_one, "multi_modal_inputs are one entry with"),
        (
            lambda rows: tu.assign_non_tensor(rows, calculate_sum_pi_squared=True),
            "ask for calculate_sum_pi_squared",
        ),
        (dense, r"input_ids are a dense tensor \(8, 23\)"),
        (with_axes, "position_ids turn row 0 as pictures do"),
    ],
)
def test_what_is_not_computed_is_refused_by_verls_name(change: Any, words: str) -> None:
    rows = rollouts(0, "v1")
    change(rows)
    with pytest.raises(BatchError, match=words):
        check_supported(rows)


@pytest.mark.parametrize("nothing", [{}, [{} for _ in LENGTHS]], ids=["one", "of-each-row"])
def test_what_asks_for_nothing_is_taken(nothing: Any) -> None:
    rows = rollouts(0, "v1")
    tu.assign_non_tensor(rows, calculate_sum_pi_squared=False)
    if isinstance(nothing, list):
        # As verl's agent loops leave it: a stack of what each row has.
        rows["multi_modal_inputs"] = torch.stack([TensorDict({}) for _ in nothing])
    else:
        tu.assign_non_tensor(rows, multi_modal_inputs=nothing)
    check_supported(rows)
