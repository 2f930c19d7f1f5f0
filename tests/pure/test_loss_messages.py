"""What the writer of a loss reads of a mistake: where it is, once, and what to change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.parallel.groups import Groups
from megatron_policy.training.faults import Fault, raise_everywhere
from megatron_policy.training.loss_calls import Call, Wrong
from megatron_policy.training.loss_checks import check_loss

ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
ALONE = Groups(ONE_RANK, ONE_RANK, ONE_RANK, ONE_RANK, ONE_RANK)
DATA = BatchedDataDict(input_ids=torch.ones(2, 3), sample_mask=torch.ones(2))


def wrong_with(loss: Any, rows: int = 2) -> Wrong:
    given = torch.ones(rows, requires_grad=True)
    wrong: list[Wrong] = []
    Call(loss, DATA, [given], lambda: loss(DATA, given)).result(wrong)
    (found,) = wrong
    return found


def of_values(data: Any, global_valid_seqs: Any, global_valid_toks: Any, values: Any) -> Any: ...
def of_scores(data: Any, global_valid_seqs: Any, global_valid_toks: Any, scores: Any) -> Any: ...
def of_logits(data: Any, global_valid_seqs: Any, global_valid_toks: Any, logits: Any) -> Any: ...
def of_something(data: Any, logprobs: Any) -> Any: ...


class OfLogprobs:
    def __call__(
        self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any
    ) -> Any: ...


@pytest.mark.parametrize(
    ("loss", "member"),
    [
        (OfLogprobs(), "LOGPROB"),
        (of_logits, "LOGIT"),
        (of_values, "VALUE"),
        (of_scores, "SCORE"),
        (of_something, "LOGPROB, LOGIT, VALUE or SCORE, by what it takes"),
    ],
)
def test_a_loss_without_input_type_is_told_which_one_to_set(loss: Any, member: str) -> None:
    with pytest.raises(LossError, match="no attribute input_type") as error:
        check_loss(loss, None)
    assert f"set input_type = LossInputType.{member}. See" in str(error.value)


def test_a_loss_with_another_input_type_is_told_that_it_has_it() -> None:
    loss = OfLogprobs()
    loss.input_type = LossInputType.LOGIT  # type: ignore[attr-defined]
    with pytest.raises(LossError, match="Its input_type is 'logit': give it these arguments, or"):
        check_loss(loss, None)


def reads_a_key_that_is_not_there(data: Any, given: torch.Tensor) -> Any:
    return (data["advantages"] * given).sum(), {}


def calls_a_library(data: Any, given: torch.Tensor) -> Any:
    return torch.nn.functional.pad(given, (1, "2")), {}


def test_a_missing_key_is_named_with_the_line_that_reads_it_and_what_to_pass() -> None:
    wrong = wrong_with(reads_a_key_that_is_not_there)
    line = reads_a_key_that_is_not_there.__code__.co_firstlineno + 1
    place = f"({Path(__file__).name}, line {line}, in reads_a_key_that_is_not_there)"
    assert (
        f"raised KeyError: 'advantages' {place}; the data have no 'advantages': pass" in wrong.what
    )
    assert "one entry for each row of input_ids" in wrong.what
    assert wrong.what.endswith("They have input_ids, sample_mask")
    assert Path(__file__).name in wrong_with(calls_a_library).what


def test_what_is_wrong_in_every_microbatch_is_said_once() -> None:
    faults = [Fault(0, 0, place, (place,), "it is wrong") for place in range(5)]
    with pytest.raises(LossError) as error:
        raise_everywhere(faults, ALONE, "Nothing has changed.")
    assert str(error.value) == (
        "it is wrong. This is in microbatch 0 of global batch 0 on data-parallel replica 0 "
        "(rows 0), and so in 4 more. Nothing has changed."
    )
    several = [Fault(0, 0, 5, (5,), f"mistake {number}") for number in range(7)]
    with pytest.raises(LossError) as error:
        raise_everywhere([*faults, *several], ALONE, "Nothing has changed.")
    said = str(error.value)
    assert said.count("it is wrong") == 1 and "Also: mistake 0. This is in microbatch 5" in said
    assert "mistake 3" in said and "mistake 4" not in said and ". Also: 3 more. Nothing" in said


@pytest.mark.parametrize("rows", [1, 2])
def test_a_loss_for_each_row_is_refused_for_any_number_of_rows(rows: int) -> None:
    wrong = wrong_with(lambda data, given: (given * 2, {}), rows)
    assert (
        f"of shape ({rows},), which is not a scalar: add its entries up, with sum()" in wrong.what
    )
