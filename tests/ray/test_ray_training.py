"""Mistakes in losses and batches leave a policy of workers usable, and what it computes right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, LossError, WorkerError
from megatron_policy.workers import RayVirtualCluster
from tests import oracle
from tests.exact import Exact, assert_equal
from tests.losses import SequenceNLL, TokenNLL
from tests.malformed import malformed
from tests.mistaken import MISTAKES, READING, Mistaken, NoGradientOfSqrt
from tests.ray.policies import (
    DP2,
    GBS,
    PP2,
    TOKENIZER,
    TP2,
    VOCAB,
    PolicyMaker,
    batch,
    config_of,
)

REFUSED = (BatchError, ConfigError)


def good() -> BatchedDataDict:
    """One global batch, in which every row has tokens that count."""
    data = batch(rows=GBS)
    data["sample_mask"] = torch.ones(GBS)
    data["token_mask"][:, 1] = 1
    return data


class Oracle:
    """What transformers says of a policy that has been trained on these global batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: list[BatchedDataDict] = []
        self._learned: dict[int, oracle.Learned] = {}

    def check_reading(self, policy: Policy) -> None:
        """The loss and log-probabilities of the policy as it is."""
        tokens = good()["input_ids"]
        read = partial(oracle.hf_logprobs, tokens=tokens)
        steps = len(self.taken)
        expected = self.learned(steps).read(read) if steps else Exact.of(self.path, read)
        inside = torch.arange(1, tokens.size(1)) < good()["input_lengths"].unsqueeze(1)
        found = policy.get_logprobs(good())["logprobs"][:, 1:]
        assert_equal("logprobs", found[inside], expected[inside])
        evaluated = policy.train(good(), TokenNLL(), eval_mode=True)
        # The loss of the next step is that of the policy as it is.
        self.learned(steps + 1).assert_same_loss(evaluated["loss"], steps)

    def check_step(self, policy: Policy) -> None:
        """One more step: its loss and gradient."""
        steps = len(self.taken)
        result = policy.train(good(), TokenNLL())
        learned = self.learned(steps + 1)
        learned.assert_same_loss(result["loss"], steps)
        learned.assert_same_norm(result["grad_norm"], steps)
        self.taken.append(good())

    def take(self, data: BatchedDataDict) -> None:
        """The policy has taken a step on another global batch."""
        self.taken.append(data)
        self._learned.clear()

    def learned(self, steps: int) -> oracle.Learned:
        """What transformers learns in so many steps, 1 or more; those to come are on `good`."""
        if steps not in self._learned:
            data = BatchedDataDict.from_batches([*self.taken, good()][:steps])
            self._learned[steps] = oracle.Learned.of(self.path, data, GBS, oracle.token_level)
        return self._learned[steps]


@pytest.fixture(scope="module")
def replicas(checkpoint: Callable[..., Path]) -> Iterator[tuple[Policy, Oracle]]:
    """Two data-parallel workers that every mistake of this file is made with, and what they know.
    Each test finds the policy right and leaves it so.
    """
    cluster = RayVirtualCluster([2], use_gpus=False)
    policy = Policy(cluster, config_of(checkpoint, DP2), TOKENIZER)
    yield policy, Oracle(checkpoint("qwen2", vocab=VOCAB))
    assert policy.shutdown()
    cluster.shutdown()


def test_two_replicas_compute_the_right_numbers_after_every_loss_that_failed(
    replicas: tuple[Policy, Oracle],
) -> None:
    make_every_mistake(*replicas)


@pytest.mark.parametrize("layout", [TP2, PP2], ids=["tp2", "pp2"])
def test_a_replica_of_two_computes_the_right_numbers_after_every_loss_that_failed(
    make_policy: PolicyMaker, checkpoint: Callable[..., Path], layout: dict[str, Any]
) -> None:
    make_every_mistake(make_policy(layout), Oracle(checkpoint("qwen2", vocab=VOCAB)))


def make_every_mistake(policy: Policy, truth: Oracle) -> None:
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
    replicas: tuple[Policy, Oracle],
) -> None:
    policy, truth = replicas
    with pytest.raises(LossError) as caught:
        policy.train(batch(), Mistaken("token", "raises", rank=1, call=3), mbs=1)
    # Two global batches of 4, of which the second rank has rows 2, 3 and 6, 7.
    said = str(caught.value)
    assert "in microbatch 1 of global batch 1 on data-parallel replica 1 (rows 7)" in said
    assert "mistaken.py, line" in said
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "the reward model has no answer" in caught.value.__cause__.cause
    assert any("in __call__" in note for note in caught.value.__notes__)
    truth.take(batch().slice(0, GBS))
    truth.check_reading(policy)


def test_a_part_that_failed_can_be_dropped_and_the_next_step_is_right(
    replicas: tuple[Policy, Oracle],
) -> None:
    policy, truth = replicas
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
    replicas: tuple[Policy, Oracle], monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    policy, _ = replicas
    for ask in ("run_sharded", "run_all"):
        monkeypatch.setattr(policy.worker_group, ask, unasked)
    for call in (
        lambda: policy.train(good(), loss),
        lambda: policy.begin_train_step(loss),
    ):
        with pytest.raises(LossError):
            call()


def unasked(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the workers were asked")


def test_what_cannot_leave_the_process_is_named(replicas: tuple[Policy, Oracle]) -> None:
    (policy, truth), loss = replicas, TokenNLL()
    loss.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="loss_fn, a TokenNLL, cannot be sent"):
        policy.train(good(), loss)
    held = BatchedDataDict(dict(good()) | {"extra": [threading.Lock()] * GBS})
    with pytest.raises(ConfigError, match="data, a BatchedDataDict, cannot be sent"):
        policy.train(held, TokenNLL())
    truth.check_step(policy)


def test_a_policy_computes_the_right_numbers_after_every_malformed_batch(
    replicas: tuple[Policy, Oracle],
) -> None:
    """Each is refused as itself, or is computed with; none breaks the workers."""
    policy, truth = replicas
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
