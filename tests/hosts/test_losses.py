"""The host's losses without the host: what they are handed, what shows of them, what is refused."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.hosts.nemo_rl.losses import adapt_loss, restore_tensors, set_aside
from megatron_policy.interfaces import LossType
from megatron_policy.training.checks import rows_per_group
from megatron_policy.training.loss_calls import check_loss
from tests.hosts.fake_host import PARTS, HostBatch, host_with


class Kind(enum.Enum):
    """The host's own enumeration."""

    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    CROSS = "distillation_cross_tokenizer"
    DRAFT = "draft"


class Remembers:
    """Remembers what it was called with."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        self.args, self.kwargs = args, kwargs
        return torch.zeros(()), {}


def rows(**more: torch.Tensor) -> BatchedDataDict:
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    plain = {"input_ids": torch.zeros(2, 4).long(), "token_mask": mask}
    return BatchedDataDict(plain | {"sample_mask": torch.tensor([1.0, 0.0])} | more)


def test_a_loss_gets_the_hosts_batch_in_either_form_of_the_call() -> None:
    older, newer, data = Remembers(), Remembers(input_type=Kind.LOGPROB), rows()
    with host_with(PARTS):
        adapt_loss(older)(torch.ones(1), data, 3, 4, vocab_parallel_rank=0)
        adapt_loss(newer)(data=data, global_valid_seqs=3, global_valid_toks=4)
    assert type(older.args[1]) is HostBatch and type(newer.kwargs["data"]) is HostBatch
    assert older.args[1]["input_ids"] is data["input_ids"]
    assert (older.args[2:], older.kwargs) == ((3, 4), {"vocab_parallel_rank": 0})
    with host_with({}):  # where there is no host, a loss is one of ours
        adapt_loss(newer)(data=data)
    assert newer.kwargs["data"] is data


def test_what_a_loss_says_of_itself_is_seen_through() -> None:
    loss = adapt_loss(
        Remembers(input_type=Kind.LOGPROB, candidates="top", metric_normalizations={})
    )
    assert (loss.loss_type, loss.input_type) == (LossType.TOKEN_LEVEL, Kind.LOGPROB)
    assert (loss.candidates, loss.metric_normalizations) == ("top", {})
    assert not hasattr(loss, "needs_entropy") and not hasattr(adapt_loss(Remembers()), "input_type")


def test_a_loss_that_separates_the_rows_of_pairs_is_given_them_together() -> None:
    class Preference(Remembers):
        def split_output_tensor(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tensor[::2], tensor[1::2]

    assert rows_per_group(adapt_loss(Preference(input_type=Kind.LOGPROB))) == 2
    assert rows_per_group(adapt_loss(Preference())) == 2
    assert rows_per_group(adapt_loss(Preference(input_type=Kind.DISTILLATION))) == 2
    assert rows_per_group(adapt_loss(Preference(rows_per_group=4))) == 4
    assert rows_per_group(adapt_loss(Remembers())) == 1


def test_a_distillation_is_prepared_by_the_host_on_a_slice_of_the_logits() -> None:
    asked: dict[str, Any] = {}

    def prepare(**call: Any) -> tuple[dict[str, Any], Any]:
        asked.update(call)
        return {"student": 7}, call["data"]

    host_loss, data = Remembers(input_type=Kind.DISTILLATION), rows()
    turned = torch.zeros(4, 2, 5).transpose(0, 1)
    loss = adapt_loss(host_loss)
    # This policy calls it in the older form, so it must not look like one of the newer.
    assert not hasattr(loss, "input_type") and loss.loss_type is LossType.TOKEN_LEVEL
    groups = {"vocab_parallel_rank": 1, "vocab_parallel_group": "tp"}
    utils = {"nemo_rl.algorithms.loss.utils": {"prepare_loss_input": prepare}}
    with host_with(PARTS | utils):
        loss(turned, data, 3, 4, context_parallel_group="cp", **groups)
    # The host's backward passes take views, which a transposed tensor does not allow.
    assert (logits := asked.pop("logits")).is_contiguous() and torch.equal(logits, turned)
    assert asked.pop("data")["token_mask"] is data["token_mask"]
    assert asked == groups | {"loss_fn": host_loss, "context_parallel_group": None}
    assert type(host_loss.kwargs.pop("data")) is HostBatch
    assert host_loss.kwargs == {"student": 7, "global_valid_seqs": 3, "global_valid_toks": 4}


@pytest.mark.parametrize(
    ("kind", "reason"), [(Kind.CROSS, "another tokenizer"), (Kind.DRAFT, "draft.enabled to false")]
)
def test_an_input_that_is_not_fed_is_refused_by_name_and_reason(kind: Kind, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"Remembers.*'{kind.value}': .*{reason}"):
        adapt_loss(Remembers(input_type=kind))


def test_ratios_of_tokens_that_do_not_count_are_one() -> None:
    before, scores = torch.full((2, 4), -200.0), torch.full((2, 3), -1.0).requires_grad_()
    loss = Remembers(input_type=Kind.LOGPROB)
    adapt_loss(loss)(data=rows(prev_logprobs=before), next_token_logprobs=scores)
    given = loss.kwargs["next_token_logprobs"]
    assert given.tolist() == [[-200.0, -1.0, -1.0], [-200.0] * 3]
    given.sum().backward()
    assert scores.grad.tolist() == [[0, 1, 1], [0, 0, 0]]
    adapt_loss(loss)(data=rows(), next_token_logprobs=scores)
    assert loss.kwargs["next_token_logprobs"] is scores


def test_a_penalty_on_divergence_gets_logprobs_of_whole_distributions_in_the_data() -> None:
    before, kept = torch.full((2, 4), -7.0), torch.full((2, 3), -1.0)
    whole, data = torch.full((2, 3), -2.0), rows(prev_logprobs=before)
    penalty = adapt_loss(Remembers(input_type=Kind.LOGPROB, reference_policy_kl_penalty=0.1))
    free = adapt_loss(Remembers(input_type=Kind.LOGPROB, reference_policy_kl_penalty=0))
    assert penalty.needs_unfiltered_logprobs and not free.needs_unfiltered_logprobs
    check_loss(penalty, None)
    with host_with(PARTS):
        penalty(data=data, next_token_logprobs=kept, next_token_logprobs_unfiltered=whole)
    given = penalty._loss_fn.kwargs
    assert given.keys() == {"data", "next_token_logprobs"}
    assert given["next_token_logprobs"].tolist() == [[-7.0, -1.0, -1.0], [-7.0] * 3]
    assert given["data"]["curr_logprobs_unfiltered"].tolist() == [[-7.0, -2.0, -2.0], [-7.0] * 3]
    assert "curr_logprobs_unfiltered" not in data
    # Without filters both are one tensor, and the host needs none in the data.
    penalty(data=data, next_token_logprobs=kept, next_token_logprobs_unfiltered=kept)
    assert "curr_logprobs_unfiltered" not in penalty._loss_fn.kwargs["data"]


def test_what_is_not_along_the_sequence_is_put_aside_and_fetched_again() -> None:
    places = torch.arange(6).reshape(2, 3)
    put = set_aside(rows(places=places), ["places", "absent"])
    assert isinstance(put["places"], list) and isinstance(put["token_mask"], torch.Tensor)
    chosen = restore_tensors(BatchedDataDict(put).select_indices([1]), ["places", "absent"])
    assert torch.equal(chosen["places"], places[1:])
    data = rows(places=places)
    assert set_aside(data, ()) is data and restore_tensors(data, ["places"]) is data
