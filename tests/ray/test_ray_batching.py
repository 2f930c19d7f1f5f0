"""Microbatches of tokens over real workers: any number of rows, answers in the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from tests import oracle
from tests.exact import UNIT, Exact, assert_equal
from tests.losses import TokenNLL
from tests.pairwise import PairsOfLogprobs, hf_result, make_pairs
from tests.ray.policies import DP2, LENGTH, VOCAB, batch, config_of, opened

ROWS, GBS = 10, 5
"""The global batch divides by neither the ranks nor the microbatch."""

TOKENS = {"enabled": True, "train_mb_tokens": 16, "logprob_mb_tokens": 24}


@pytest.fixture(scope="module", params=["dynamic_batching", "sequence_packing"])
def policy(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two data-parallel workers whose microbatches have a number of tokens."""
    config: dict[str, Any] = config_of(checkpoint, DP2) | {request.param: TOKENS}
    with opened(config) as made:
        yield made


def assert_read(what: str, found: torch.Tensor, expected: Exact, data: BatchedDataDict) -> None:
    assert found.shape[:2] == data["input_ids"].shape
    inside = torch.arange(LENGTH) < data["input_lengths"].unsqueeze(1)
    assert_equal(what, found[inside], expected[inside])


def read_by(data: BatchedDataDict, what: str, model: Any) -> torch.Tensor:
    """What transformers' model makes of each token, `[B, S]`; the largest logits `[B, S, 3]`."""
    tokens = data["input_ids"]
    if what == "logprobs":
        return torch.nn.functional.pad(oracle.hf_logprobs(model, tokens), (1, 0))
    logits = model(tokens).logits.float()
    if what == "logits":
        return logits.topk(3).values
    logprobs = logits.log_softmax(-1)
    return torch.nn.functional.pad(-(logprobs.exp() * logprobs).sum(-1)[:, :-1], (1, 0))


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 5])
def test_answers_come_back_in_the_callers_order_however_few_rows_there_are(
    policy: Policy, checkpoint: Callable[..., Path], rows: int
) -> None:
    path, data = checkpoint("qwen2", vocab=VOCAB), batch(seed=3, rows=rows)
    expected = {
        what: Exact.of(path, partial(read_by, data, what))
        for what in ("logprobs", "entropy", "logits")
    }
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    found = {
        "logprobs": policy.get_logprobs(data)["logprobs"],
        "entropy": policy.get_entropy(data)["entropy"],
        "logits": policy.get_topk_logits(data, k=3)["topk_logits"],
    }
    for what, values in found.items():
        assert_read(what, values, expected[what], data)
    assert_read("reference", reference, expected["logprobs"], data)


def test_a_row_above_the_budget_is_named_and_the_policy_goes_on(policy: Policy) -> None:
    data = oracle.make_batch(6, 30, VOCAB, 0)
    data["input_lengths"] = torch.tensor([30, 3, 3, 3, 30, 3])
    data["token_mask"] = torch.zeros(6, 30)
    with pytest.raises(BatchError, match=r"row 0 has 30 tokens.*train_mb_tokens=16"):
        policy.train(data, TokenNLL(), gbs=2)
    data["input_lengths"] = torch.tensor([3, 3, 3, 3, 30, 3])
    with pytest.raises(BatchError, match=r"row 4 has 30 tokens.*logprob_mb_tokens=24"):
        policy.get_logprobs(data)
    data["input_lengths"] = torch.tensor([3, 3, 31, 3, 3, 3])
    with pytest.raises(BatchError, match="input_lengths has 31 in row 2"):
        policy.get_entropy(data)
    del data["input_lengths"]
    with pytest.raises(BatchError, match="lack a tensor 'input_lengths'"):
        policy.get_topk_logits(data, k=2)
    assert policy.get_logprobs(batch(rows=1))["logprobs"].shape == (1, LENGTH)


def test_a_rank_without_rows_of_a_global_batch_leaves_the_loss_to_the_other(policy: Policy) -> None:
    data = batch(seed=4, rows=3)
    data["sample_mask"] = torch.ones(3)
    scores = policy.get_logprobs(data)["logprobs"]
    mask = data["token_mask"][:, 1:]
    expected = -(scores[:, 1:] * mask).sum(1) / mask.sum(1)
    results = policy.train(data, TokenNLL(), eval_mode=True, gbs=1)
    # Sums of at most LENGTH terms, in another order.
    assert results["loss"].tolist() == pytest.approx(expected.tolist(), rel=LENGTH * UNIT)


def test_pairs_stay_together_on_one_of_the_workers(
    policy: Policy, checkpoint: Callable[..., Path]
) -> None:
    data = make_pairs(5, 8, VOCAB, 1)
    path, size = checkpoint("qwen2", vocab=VOCAB), data.size

    def loss_of(model: Any, rows: BatchedDataDict) -> torch.Tensor:
        return hf_result("log-probabilities", model, rows)[0]

    hf = oracle.Learned.of(path, data, size, loss_of)
    results = policy.train(data, PairsOfLogprobs(), eval_mode=True, gbs=size)
    assert len(results["microbatch_metrics"]["pairs"]) > 2
    hf.assert_same_loss(results["loss"], 0)
    with pytest.raises(BatchError, match="gbs=5 cuts a group of 2 rows"):
        policy.train(data, PairsOfLogprobs(), eval_mode=True, gbs=5)


def test_training_is_that_of_the_whole_global_batch(
    policy: Policy, checkpoint: Callable[..., Path]
) -> None:
    data = batch(seed=1, rows=ROWS)
    hf = oracle.Learned.of(checkpoint("qwen2", vocab=VOCAB), data, GBS, oracle.token_level)
    results = policy.train(data, TokenNLL(), gbs=GBS)
    for index, loss in enumerate(results["loss"]):
        hf.assert_same_loss(loss, index)
    hf.assert_same_norm(results["grad_norm"], len(hf.exact.grad_norms) - 1)
    hf.assert_same_total(
        sum(results["microbatch_metrics"]["loss"]) * 2, *range(len(hf.exact.losses))
    )
