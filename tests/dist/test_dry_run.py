"""A loss tried before training: what is said of good and of bad ones, and that no trace is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.random_states import capture
from megatron_policy.errors import BatchError, LossError
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, fsdp_config, open_policy, own_share, policy_config
from tests.dist.layouts import LENGTH, VOCAB
from tests.losses import LogitEntropy, Result, SequenceNLL, TokenNLL, loss_mask

SIZES = {"layers": 4, "vocab": VOCAB, "hidden": 32, "heads": 4, "groups": 2, "ffn": 48}
DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
TP_PP = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


class OfLogprobs:
    """A loss made of the mask, the log-probabilities `[B, S - 1]` and both counts."""

    input_type = LossInputType.LOGPROB

    def __init__(self, function: Callable[..., Any], loss_type: LossType = LossType.TOKEN_LEVEL):
        self.function, self.loss_type = function, loss_type

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> Result:
        torch.rand(1)
        masked = next_token_logprobs * loss_mask(data)
        loss = self.function(data, masked, global_valid_seqs, global_valid_toks)
        return loss, {"loss": loss.sum().item()}


class Margin(OfLogprobs):
    """A loss of pairs of rows."""

    rows_per_group = 2

    def __init__(self) -> None:
        super().__init__(self.margin, LossType.SEQUENCE_LEVEL)

    @staticmethod
    def margin(data: BatchedDataDict, x: torch.Tensor, seqs: torch.Tensor, _: Any) -> torch.Tensor:
        rewards = x.sum(-1)
        return -(rewards[::2] - rewards[1::2]).sigmoid().log().sum() / (seqs / 2)


GOOD = (SequenceNLL, LogitEntropy, TokenNLL, Margin)


def advantages(data: BatchedDataDict, *rest: Any) -> torch.Tensor:
    return data["advantages"].sum()


SEQUENCES = LossType.SEQUENCE_LEVEL
WARNED = {
    "mean of a microbatch": (
        OfLogprobs(lambda data, x, seqs, toks: -x.sum() / loss_mask(data).sum()),
        "depends on how rows are cut into microbatches",
    ),
    "baseline of a microbatch": (
        OfLogprobs(
            lambda data, x, seqs, toks: (x.sum(-1) - x.sum(-1).mean()).square().sum() / seqs
        ),
        "compare rows with each other only within a group",
    ),
    "sum": (
        OfLogprobs(lambda data, x, seqs, toks: -x.sum()),
        "is not divided by global_valid_seqs",
    ),
    "other count": (
        OfLogprobs(lambda data, x, seqs, toks: -x.sum() / toks, SEQUENCES),
        "loss_type is 'sequence_level', but the loss is divided by global_valid_toks alone",
    ),
    "nothing": (OfLogprobs(lambda data, x, seqs, toks: (x * 0).sum()), "nothing is learnt"),
}
REFUSED = {
    "missing key": (
        OfLogprobs(advantages),
        "KeyError: 'advantages' .* the data have no 'advantages': pass it .* have input_ids",
    ),
    "infinite slope": (
        OfLogprobs(lambda data, x, seqs, toks: (x - x.detach()).sum().abs().sqrt() / toks),
        "gradient of next_token_logprobs that is not finite",
    ),
    "NaN": (OfLogprobs(lambda data, x, seqs, toks: x.sum() * float("nan")), "which is not finite"),
    "wrong shape": (OfLogprobs(lambda data, x, seqs, toks: x @ x), "raised RuntimeError"),
    "vector": (OfLogprobs(lambda data, x, seqs, toks: -x.sum(-1) / toks), "not a scalar"),
}


def state(policy: MegatronPolicy) -> list[Any]:
    """Weights, gradients, optimizer state as bytes; random states and counts."""
    engine = policy._engine
    held = [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()
        for storages in engine.storages().values()
        for storage in storages
    ]
    buffers = [each.clone() for each in engine.volatile_buffers()]
    assert engine.trainable is not None
    generators = {"sampling": policy._continue.generator}
    counts = (capture(engine, generators), policy.steps, engine.trainable.schedule_state())
    return [*held, *buffers, counts]


@contextmanager
def without_a_trace(policy: MegatronPolicy, what: object) -> Iterator[None]:
    """Asserts that the body leaves the policy as it was."""
    before = state(policy)
    yield
    for one, other in zip(before, state(policy), strict=True):
        alike = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert alike, what


def try_all(config: dict[str, Any], good: bool) -> list[Any]:
    """What a policy in the middle of training, and of a step, says of each loss; without a trace
    of it, gradients included.
    """
    bad = [loss for loss, _ in (WARNED | REFUSED).values()]
    with open_policy(config, init_reference_model=False) as policy:
        share = own_share(policy, DATA)
        policy.train(share, SequenceNLL())
        found: list[Any] = []
        for loss in [each() for each in GOOD] if good else bad:
            with without_a_trace(policy, loss):
                try:
                    found.append(policy.dry_run(share, loss))
                except (LossError, BatchError) as error:
                    found.append(f"{type(error).__name__}: {error}")
        policy.accumulator.begin(SequenceNLL())
        policy.accumulator.microbatch(share.slice(0, 2))
        with without_a_trace(policy, "between the parts of a step"):
            policy.dry_run(share, SequenceNLL())
        policy.accumulator.finish()
        return found


CASES: dict[str, tuple[int, Any]] = {
    "tp2 pp2": (4, lambda path: policy_config(path, TP_PP)),
    "dp2 packed": (2, lambda path: policy_config(path, {}, **PACKED)),
    "experts": (
        2,
        lambda path: policy_config(path, {"expert_model_parallel_size": 2}, **PACKED),
    ),
    "fsdp2": (2, lambda path: fsdp_config(path, {})),
}


@pytest.mark.parametrize("name", CASES)
def test_good_losses_pass_without_warnings_and_without_a_trace(
    ranks, checkpoint: Callable[..., Path], name: str
) -> None:
    world, config = CASES[name]
    path = checkpoint("mixtral" if name == "experts" else "qwen2", **SIZES)
    for found in ranks.run(world, try_all, config(path), True):
        for loss, seen in zip(GOOD, found, strict=True):
            assert seen.warnings == (), str(seen)
            assert re.match(r"dry run on rows [\d, ]+: loss ", str(seen)), str(seen)
            assert "\n  given data['input_ids']: " in str(seen) and "\n  metric loss: " in str(seen)
            assert seen.metrics["loss"] == pytest.approx(seen.loss)
            assert seen.tokens > 0 and all(norm > 0 for norm in seen.gradients.values())
            assert "data['input_ids']" in seen.inputs
            assert len(seen.rows) == 2 * getattr(loss, "rows_per_group", 1)


def test_bad_losses_are_refused_or_warned_of_and_leave_no_trace(
    ranks, checkpoint: Callable[..., Path]
) -> None:
    (found,) = ranks.run(1, try_all, policy_config(checkpoint("qwen2", **SIZES), {}), False)
    for (name, (_, said)), seen in zip((WARNED | REFUSED).items(), found, strict=True):
        text = "\n".join(seen.warnings) if name in WARNED else str(seen)
        assert re.search(said, text), (name, text)


def try_alone(config: dict[str, Any]) -> None:
    """Dry runs of one row, and of rows without tokens, by a policy without an optimizer."""
    nothing = DATA.slice(0, 2)
    nothing["token_mask"] = torch.zeros_like(nothing["token_mask"])
    unused = {"init_reference_model": False, "init_optimizer": False}
    with open_policy(config, **unused) as policy:
        one = policy.dry_run(DATA.slice(0, 1), SequenceNLL())
        assert one.rows == (0, 0) and one.warnings == ()
        assert str(one).startswith("dry run on row 0, taken twice: loss ")
        empty = policy.dry_run(nothing, SequenceNLL())
        skipped, unlearnt = empty.warnings
        assert skipped == "train() would skip every step of these data: no valid tokens in them"
        assert "nothing is learnt" in unlearnt and empty.tokens == 0 and skipped in str(empty)
    with open_policy(config | {"skip_empty_steps": False}, **unused) as policy:
        assert policy.dry_run(nothing, SequenceNLL()).warnings == (unlearnt,)


def test_one_row_is_taken_twice_and_rows_without_tokens_are_named(
    ranks, checkpoint: Callable[..., Path]
) -> None:
    ranks.run(1, try_alone, policy_config(checkpoint("qwen2", **SIZES), {}))
