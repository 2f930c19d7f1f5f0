"""Mistakes in losses and batches leave a policy of workers usable, and what it computes right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, LossError, WorkerError
from tests import oracle
from tests.exact import Exact, assert_equal
from tests.losses import SequenceNLL, TokenNLL
from tests.malformed import malformed
from tests.mistaken import MISTAKES, READING, Mistaken, NoGradientOfSqrt
from tests.ray.policies import DP2, GBS, PP2, TP2, VOCAB, PolicyMaker, batch

REFUSED = (BatchError, ConfigError)


def good() -> BatchedDataDict:
    """One global batch, in which every row has tokens that count."""
    data = batch(rows=GBS)
    data["sample_mask"] = torch.ones(GBS)
    data["token_mask"][:, 1] = 1
    return data


class Oracle:
    """What transformers says of a policy that has been trained on `good` so many times."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, 0

    def check_reading(self, policy: Policy) -> None:
        """The loss and log-probabilities of the policy as it is."""
        tokens = good()["input_ids"]
        read = partial(oracle.hf_logprobs, tokens=tokens)
        start = Exact.of(self.path, read)
        expected = self.learned(self.steps).read(read) if self.steps else start
        inside = torch.arange(1, tokens.size(1)) < good()["input_lengths"].unsqueeze(1)
        found = policy.get_logprobs(good())["logprobs"][:, 1:]
        assert_equal("logprobs", found[inside], expected[inside])
        evaluated = policy.train(good(), TokenNLL(), eval_mode=True)
        # The loss of the next step is that of the policy as it is.
        self.learned(self.steps + 1).assert_same_loss(evaluated["loss"], self.steps)

    def check_step(self, policy: Policy) -> None:
        """One more step: its loss and gradient."""
        result = policy.train(good(), TokenNLL())
        learned = self.learned(self.steps + 1)
        learned.assert_same_loss(result["loss"], self.steps)
        learned.assert_same_norm(result["grad_norm"], self.steps)
        self.steps += 1

    def learned(self, steps: int) -> oracle.Learned:
        """What transformers learns in so many steps, 1 or more."""
        data = BatchedDataDict.from_batches([good()] * steps)
        return oracle.Learned.of(self.path, data, GBS, oracle.token_level)


@pytest.mark.parametrize("layout", [DP2, TP2, PP2], ids=["dp2", "tp2", "pp2"])
def test_a_policy_computes_the_right_numbers_after_every_loss_that_failed(
    make_policy: PolicyMaker, checkpoint: Callable[..., Path], layout: dict[str, Any]
) -> None:
    policy, truth = make_policy(layout), Oracle(checkpoint("qwen2", vocab=VOCAB))
    for mistake, (_, message) in MISTAKES.items():
        for kind in ("token", "sequence"):
            with pytest.raises(LossError) as caught:
                policy.train(good(), Mistaken(kind, mistake, rank=1))
            assert message in str(caught.value)
            assert "on data-parallel replica " in str(caught.value)
        if mistake in READING:
            with pytest.raises(LossError, match="in microbatch 0"):
                policy.train(good(), Mistaken("token", mistake, rank=1, call=0), eval_mode=True)
        truth.check_reading(policy)
    truth.check_step(policy)
    for loss in (Everywhere(), NoGradientOfSqrt(1)):
        with pytest.raises(LossError):
            policy.train(good(), loss)
        truth.check_step(policy)


class Everywhere(SequenceNLL):
    """Has a typo that shows on every rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return kwargs["next_token_logprob"].sum(), {}


def test_the_message_names_the_driver_s_rows_and_the_line_of_the_loss(
    make_policy: PolicyMaker,
) -> None:
    policy = make_policy(DP2)
    with pytest.raises(LossError) as caught:
        policy.train(batch(), Mistaken("sequence", "raises", rank=1, call=3), mbs=1)
    # Two global batches of 4, of which the second rank has rows 2, 3 and 6, 7.
    said = str(caught.value)
    assert "in microbatch 1 of global batch 1 on data-parallel replica 1 (rows 7)" in said
    assert "mistaken.py, line" in said
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "the reward model has no answer" in caught.value.__cause__.cause
    assert any("in __call__" in note for note in caught.value.__notes__)


def test_a_part_that_failed_can_be_dropped_and_the_next_step_is_right(
    make_policy: PolicyMaker, checkpoint: Callable[..., Path]
) -> None:
    policy, truth = make_policy(DP2), Oracle(checkpoint("qwen2", vocab=VOCAB))
    for mistake in ("raises", "NaN"):
        policy.begin_train_step(Mistaken("token", mistake, rank=1))
        with pytest.raises(LossError, match=r"on data-parallel replica 1 \(rows 3\)"):
            policy.train_microbatch(good())
        with pytest.raises(ConfigError, match=r"call abort_train_step\(\)"):
            policy.finish_train_step()
        policy.abort_train_step()
        truth.check_step(policy)


@pytest.mark.parametrize("loss", [TokenNLL, None, "token", lambda logits: logits])
def test_what_is_no_loss_is_refused_before_a_worker_is_asked(
    make_policy: PolicyMaker, loss: Any
) -> None:
    policy = make_policy(DP2)
    policy.worker_group.run_sharded = policy.worker_group.run_all = unasked  # type: ignore[method-assign]
    for call in (
        lambda: policy.train(good(), loss),
        lambda: policy.begin_train_step(loss),
    ):
        with pytest.raises(LossError):
            call()


def unasked(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the workers were asked")


def test_what_cannot_leave_the_process_is_named(make_policy: PolicyMaker) -> None:
    policy, loss = make_policy(DP2), TokenNLL()
    loss.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="loss_fn, a TokenNLL, cannot be sent"):
        policy.train(good(), loss)
    held = BatchedDataDict(dict(good()) | {"extra": [threading.Lock()] * GBS})
    with pytest.raises(ConfigError, match="data, a BatchedDataDict, cannot be sent"):
        policy.train(held, TokenNLL())
    policy.train(good(), TokenNLL())


def test_a_policy_computes_the_right_numbers_after_every_malformed_batch(
    make_policy: PolicyMaker, checkpoint: Callable[..., Path]
) -> None:
    """Each is refused as itself, or is computed with; none breaks the workers."""
    policy, truth = make_policy(DP2), Oracle(checkpoint("qwen2", vocab=VOCAB))
    refused = 0
    for call in (evaluate, Policy.get_logprobs):
        for number, (name, data) in enumerate(malformed(good)):
            try:
                call(policy, data)
            except REFUSED:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            if number % 50 == 0:
                truth.check_reading(policy)
    assert refused > 700
    truth.check_reading(policy)
    truth.check_step(policy)


def evaluate(policy: Policy, data: Any) -> None:
    """What is only unusual must change no weight."""
    policy.train(data, SequenceNLL(), eval_mode=True)
