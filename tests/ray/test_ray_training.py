"""Training over real workers, against the Hugging Face model in one process; mistakes in losses and
batches leave the policy usable, and what it computes right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import approx
from transformers import AutoModelForCausalLM

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, LossError, WorkerError
from megatron_policy.workers import RayVirtualCluster
from tests import oracle
from tests.exact import Exact, assert_equal, load_hf
from tests.losses import SequenceNLL, TokenNLL
from tests.malformed import malformed
from tests.mistaken import MISTAKES, READING, Mistaken, NoGradientOfSqrt
from tests.ray.policies import (
    DP2,
    GBS,
    LENGTH,
    PP2,
    ROWS,
    TOKENIZER,
    TP2,
    VOCAB,
    batch,
    config_of,
    opened,
)

REFUSED = (BatchError, ConfigError)
LORA = {"peft": {"enabled": True, "dim": 4, "alpha": 8.0, "lora_B_init_method": "normal"}}


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
        assert result["speed"]["tokens"] == good()["input_lengths"].sum()
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
def workers(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path]
) -> Iterator[tuple[Policy, Oracle]]:
    """Two workers, and what they should know. Each test finds the policy right and leaves it so."""
    with opened(config_of(checkpoint, request.param)) as policy:
        yield policy, Oracle(checkpoint("qwen2", vocab=VOCAB))
        assert policy.shutdown()  # and again at the end


@pytest.fixture
def trained(workers: tuple[Policy, Oracle]) -> tuple[Policy, Oracle]:
    """The workers, ready to train, whichever tests came before."""
    workers[0].prepare_for_training()
    return workers


ALL_LAYOUTS = pytest.mark.parametrize(
    "workers", [DP2, TP2, PP2], ids=["dp2", "tp2", "pp2"], indirect=True
)
REPLICAS = pytest.mark.parametrize("workers", [DP2], ids=["dp2"], indirect=True)


@ALL_LAYOUTS
def test_two_workers_do_what_one_process_of_transformers_does(
    workers: tuple[Policy, Oracle], tmp_path: Path
) -> None:
    policy, truth = workers
    path, data = truth.path, batch()
    assert not truth.taken, "the first test of a policy"

    assert_logprobs(policy.get_logprobs(data)["logprobs"], path, data)
    part = data.slice(0, 5)  # does not divide over two ranks; the caller must not notice
    assert_logprobs(policy.get_logprobs(part)["logprobs"], path, part)
    assert_topk(policy, path, data)
    assert_greedy_tokens(policy, load_hf(path), data)

    policy.prepare_for_training()
    more = batch(seed=1, rows=GBS)
    everything = BatchedDataDict.from_batches([data, more])
    hf = oracle.Learned.of(path, everything, GBS, oracle.token_level)
    evaluated = policy.train(data, TokenNLL(), eval_mode=True)
    assert evaluated["loss"].shape == (ROWS // GBS,)
    sampled = policy.get_logprobs(data)["logprobs"] - 0.5
    results = policy.train(BatchedDataDict(data | {"rollout_log_probs": sampled}), TokenNLL())
    in_parts = train_in_parts(policy, more)
    policy.finish_training()
    assert policy.report().mismatch == results["rollout_mismatch"]
    assert results["rollout_mismatch"]["train_rollout_logprob_abs_diff"] == approx(0.5, abs=2e-5)
    assert results["rollout_mismatch"]["train_rollout_tokens"] == results["valid_tokens"][0]
    assert results["loss"].shape == (2,) and results["grad_norm"].shape == (1,)
    for index, loss in enumerate(results["loss"]):
        hf.assert_same_loss(loss, index)
    hf.assert_same_norm(results["grad_norm"], 1)
    for step in (data.slice(0, GBS), data.slice(GBS, ROWS), more):
        truth.take(step)
    metrics = results["microbatch_metrics"]
    assert len(metrics["loss"]) == ROWS, "microbatches of one row, of all data-parallel ranks"
    hf.assert_same_total(sum(metrics["loss"]) * 2, 0, 1)
    hf.assert_same_loss(in_parts["loss"], 2)
    hf.assert_same_norm(in_parts["grad_norm"], 2)
    hf.assert_same_total(sum(in_parts["microbatch_metrics"]["loss"]), 2)

    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert_logprobs(reference, path, data)
    policy.export_hf(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, weight in exported.named_parameters():
        hf.assert_same_weight(weight.data, hf.exact.weights[name], name)
    assert_logprobs(policy.get_logprobs(data)["logprobs"], tmp_path / "exported", data)


def train_in_parts(policy: Policy, data: BatchedDataDict) -> dict[str, Any]:
    """One step, after one that is dropped and calls that have to wait; one part is one row, so that
    a data-parallel rank has none.
    """
    with pytest.raises(ConfigError, match=r"call begin_train_step\(\) first"):
        policy.train_microbatch(data)
    for size in ("gbs", "mbs"):
        with pytest.raises(BatchError, match=f"{size} is -1"):
            policy.begin_train_step(TokenNLL(), **{size: -1})
    policy.begin_train_step(TokenNLL())
    policy.train_microbatch(data.slice(1, 4))
    policy.abort_train_step()
    policy.begin_train_step(TokenNLL())
    with pytest.raises(ConfigError, match=r"nothing to step with: call train_microbatch\(\)"):
        policy.finish_train_step()
    policy.train_microbatch(data.slice(0, 1))
    with pytest.raises(ConfigError, match="a training step is open"):
        policy.finish_training()
    with pytest.raises(BatchError, match="sample_mask"):
        policy.train_microbatch({"input_ids": data["input_ids"]})
    policy.train_microbatch(data.slice(1, 4))
    return policy.finish_train_step()


def assert_logprobs(found: torch.Tensor, path: Path, data: BatchedDataDict) -> None:
    expected = Exact.of(path, partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    assert found.shape == data["input_ids"].shape
    assert not found[:, 0].any()
    inside = torch.arange(1, LENGTH) < data["input_lengths"].unsqueeze(1)
    assert_equal("logprobs", found[:, 1:][inside], expected[inside])


def assert_topk(policy: Policy, path: Path, data: BatchedDataDict) -> None:
    found = policy.get_topk_logits(data.slice(0, 3), k=4)
    logits = Exact.of(path, lambda m: m(data["input_ids"][:3]).logits)
    inside = torch.arange(LENGTH) < data["input_lengths"][:3].unsqueeze(1)
    expected = logits.value.topk(4, dim=-1).values[inside]
    assert_equal("logits", found["topk_logits"][inside], replace(logits, value=expected))
    assert torch.equal(logits.value.gather(-1, found["topk_indices"])[inside], expected)


def assert_greedy_tokens(policy: Policy, model: Any, data: BatchedDataDict) -> None:
    """Unequal prompts, more of them than divide; the longest of each rank differ."""
    prompts = data.slice(0, 3)
    found = policy.generate(prompts, greedy=True)
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        tokens = prompts["input_ids"][row, :length]
        with torch.no_grad():
            for _ in range(6):
                following = model(tokens.unsqueeze(0)).logits[0, -1].argmax()
                tokens = torch.cat([tokens, following.view(1)])
        end = int(found["unpadded_sequence_lengths"][row])
        assert found["output_ids"][row, :end].tolist() == tokens.tolist()
        assert int(found["generation_lengths"][row]) == 6
        assert not found["output_ids"][row, end:].any(), "padding is the tokenizer's pad token"


@pytest.mark.nightly
@ALL_LAYOUTS
def test_a_policy_computes_the_right_numbers_after_every_loss_that_failed(
    trained: tuple[Policy, Oracle],
) -> None:
    policy, truth = trained
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


@pytest.mark.nightly
@REPLICAS
def test_the_message_names_the_driver_s_rows_and_the_line_of_the_loss(
    trained: tuple[Policy, Oracle],
) -> None:
    policy, truth = trained
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


@REPLICAS
def test_a_part_that_failed_can_be_dropped_and_the_next_step_is_right(
    trained: tuple[Policy, Oracle],
) -> None:
    policy, truth = trained
    for mistake in ("raises", "NaN"):
        policy.begin_train_step(Mistaken("token", mistake, rank=1))
        with pytest.raises(LossError, match=r"on data-parallel replica 1 \(rows 3\)"):
            policy.train_microbatch(good())
        with pytest.raises(ConfigError, match=r"call abort_train_step\(\)"):
            policy.finish_train_step()
        policy.abort_train_step()
        truth.check_step(policy)


@REPLICAS
@pytest.mark.parametrize("loss", [TokenNLL, None, "token", lambda logits: logits])
def test_what_is_no_loss_is_refused_before_a_worker_is_asked(
    trained: tuple[Policy, Oracle], monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    policy, _ = trained
    for ask in ("run_sharded", "run_all"):
        monkeypatch.setattr(policy.worker_group, ask, unasked)
    with pytest.raises(LossError):
        policy.train(good(), loss)
    with pytest.raises(LossError):
        policy.begin_train_step(loss)


def unasked(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the workers were asked")


@REPLICAS
def test_what_cannot_leave_the_process_is_named(trained: tuple[Policy, Oracle]) -> None:
    (policy, truth), loss = trained, TokenNLL()
    loss.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="loss_fn, a TokenNLL, cannot be sent"):
        policy.train(good(), loss)
    held = BatchedDataDict(dict(good()) | {"extra": [threading.Lock()] * GBS})
    with pytest.raises(ConfigError, match="data, a BatchedDataDict, cannot be sent"):
        policy.train(held, TokenNLL())
    truth.check_step(policy)


@pytest.mark.nightly
def test_the_reference_of_a_policy_with_adapters_is_the_checkpoint_that_is_named(
    checkpoint: Callable[..., Path],
) -> None:
    other, data = checkpoint("qwen2", vocab=VOCAB, seed=3), batch()
    config = config_of(checkpoint, DP2 | LORA) | {"reference_model_name": str(other)}
    cluster = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(ConfigError, match="leave the key out, or let the policy have a reference"):
        Policy(cluster, config, TOKENIZER, init_reference_model=False)
    config["reference_model_name"] = str(other / "nothing")
    with pytest.raises(ConfigError, match=r"reference_model_name: model .* is not a directory"):
        Policy(cluster, config, TOKENIZER)
    cluster.shutdown()
    with opened(config | {"reference_model_name": str(other)}) as policy:
        before = policy.get_logprobs(data)["logprobs"]
        for step in range(2):
            policy.prepare_for_lp_inference()
            read = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
            assert_logprobs(read, other, data)
            assert torch.equal(policy.get_logprobs(data)["logprobs"], before) == (step == 0)
            policy.prepare_for_training()
            policy.train(data, TokenNLL(), gbs=GBS)


@pytest.mark.nightly
@REPLICAS
def test_a_policy_computes_the_right_numbers_after_every_malformed_batch(
    trained: tuple[Policy, Oracle],
) -> None:
    """Each is refused as itself, or is computed with; none breaks the workers."""
    policy, truth = trained
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
