"""What the writer of a loss reads of a mistake: where it is, once, and what to change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.parallel.groups import Groups
from megatron_policy.training.loss_calls import check_loss, try_loss
from megatron_policy.training.loss_faults import LossFault, raise_everywhere

ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
ALONE = Groups(ONE_RANK, ONE_RANK, ONE_RANK, ONE_RANK, ONE_RANK)
DATA = BatchedDataDict(input_ids=torch.ones(2, 3), sample_mask=torch.ones(2))


def fault_of(loss: Any, rows: int = 2) -> LossFault:
    given = torch.ones(rows, requires_grad=True)
    faults: list[LossFault] = []
    try_loss(loss, partial(loss, DATA, given), DATA, [given], faults)
    (found,) = faults
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
    fault = fault_of(reads_a_key_that_is_not_there)
    line = reads_a_key_that_is_not_there.__code__.co_firstlineno + 1
    place = f"({Path(__file__).name}, line {line}, in reads_a_key_that_is_not_there)"
    assert (
        f"raised KeyError: 'advantages' {place}; the data have no 'advantages': pass" in fault.what
    )
    assert "one entry for each row of input_ids" in fault.what
    assert fault.what.endswith("They have input_ids, sample_mask")
    assert Path(__file__).name in fault_of(calls_a_library).what


class WithHelpers:
    """A loss whose frames are below `__call__`, some of them a library's."""

    def __call__(self, data: Any, given: torch.Tensor) -> Any:
        return self.masked(given)

    def masked(self, given: torch.Tensor) -> Any:
        return torch.nn.functional.pad(given, (1, "2")), {}


class OfAPartial:
    """A loss whose own code is in C."""

    __call__ = partial(calls_a_library)


def test_frames_are_those_of_the_function_that_was_passed() -> None:
    def lines(fault: LossFault) -> list[str]:
        return [line.split(", in ")[1] for line in fault.trace.split("\n") if ", in " in line]

    for loss in (WithHelpers(), partial(WithHelpers()), WithHelpers().__call__):
        fault = fault_of(loss)
        assert lines(fault)[:2] == ["__call__", "masked"] and "in masked)" in fault.what
    assert lines(fault_of(OfAPartial()))[0] == "calls_a_library"
    refused = fault_of(lambda data: None)
    assert refused.what.endswith("were given") and not lines(refused)


def test_what_is_wrong_in_every_microbatch_is_said_once() -> None:
    faults = [LossFault(microbatch=place, rows=(place,), what="it is wrong") for place in range(5)]
    with pytest.raises(LossError) as error:
        raise_everywhere(faults, ALONE, "Nothing has changed.")
    assert str(error.value) == (
        "it is wrong. This is in microbatch 0 of global batch 0 on data-parallel replica 0 "
        "(rows 0), and so in 4 more. Nothing has changed."
    )
    several = [LossFault(microbatch=5, rows=(5,), what=f"mistake {n}") for n in range(7)]
    with pytest.raises(LossError) as error:
        raise_everywhere([*faults, *several], ALONE, "Nothing has changed.")
    said = str(error.value)
    assert said.count("it is wrong") == 1 and "Also: mistake 0. This is in microbatch 5" in said
    assert "mistake 3" in said and "mistake 4" not in said and ". Also: 3 more. Nothing" in said


@pytest.mark.parametrize("rows", [1, 2])
def test_a_loss_for_each_row_is_refused_for_any_number_of_rows(rows: int) -> None:
    fault = fault_of(lambda data, given: (given * 2, {}), rows)
    assert (
        f"of shape ({rows},), which is not a scalar: add its entries up, with sum()" in fault.what
    )
