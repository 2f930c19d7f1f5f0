"""Losses of pairs of rows are what one process of Hugging Face transformers and torch makes of
whole batches, with every way to make microbatches; a pair is never separated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.model_table import bind_model
from megatron_policy.errors import BatchError, LossError
from megatron_policy.lm_head.output import Output
from megatron_policy.packing import plan
from megatron_policy.policy import MegatronPolicy
from megatron_policy.training import batching
from megatron_policy.training.sharding import BatchDispatcher
from tests import oracle, pairwise
from tests.dist.cases import (
    GLOBAL_BATCH,
    learned_weights,
    open_policy,
    own_share,
    own_steps,
    policy_config,
)
from tests.dist.layouts import FSDP2_LAYOUTS, LENGTH, VOCAB, layout
from tests.dist.resuming import replaced
from tests.dist.shortcuts import dynamic, packed
from tests.dist.test_docs import python_blocks
from tests.dist.test_layouts import assert_same_shards
from tests.exact import ROOM, Exact, assert_equal

TIED, CANDIDATES, STEPS = True, 4, 2
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": dynamic(40, train_mb_tokens=34, sequence_length_round=2),
    "packed": packed(40, train_mb_tokens=26),
}
"""Budgets hold the longest pair, and a few pairs at most."""
LAYOUTS = {
    "one process": layout(1),
    "TP2": layout(2, tp=2),
    "PP2": layout(2, pp=2),
    "CP2": layout(2, context_parallel_size=2),
    "DP2": layout(2),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "TP2xCP2+SP": layout(4, tp=2, context_parallel_size=2, sequence_parallel=True),
    **{name: FSDP2_LAYOUTS[name] for name in ("FSDP2 x 2", "FSDP2 CP2")},
}


@dataclass(frozen=True)
class Case:
    """`dealt`: rows are dealt by the driver, with its plan; otherwise each data-parallel rank has
    its share in order, and plans it itself.
    """

    layout: str
    batching: str
    loss: str
    dealt: bool = True

    @property
    def name(self) -> str:
        return f"{self.layout} | {self.batching} | {self.loss}" + " | own" * (not self.dealt)

    def config(self, path: Path) -> dict[str, Any]:
        return policy_config(path, LAYOUTS[self.layout].megatron, **BATCHINGS[self.batching])


def cases() -> list[Case]:
    """Every layout with every batching, with losses in turn; and every loss with every batching."""
    kinds = list(pairwise.LOSSES)
    found = [
        Case(name, batching, kinds[(row + column) % len(kinds)])
        for row, name in enumerate(LAYOUTS)
        for column, batching in enumerate(BATCHINGS)
    ]
    alone = [Case("one process", batching, kind) for batching in BATCHINGS for kind in kinds]
    own = [Case("DP2", batching, "log-probabilities", False) for batching in BATCHINGS]
    return list(dict.fromkeys([*found, *own, *alone]))


@cache
def rows() -> BatchedDataDict:
    return pairwise.make_pairs(STEPS * GLOBAL_BATCH // 2, LENGTH, VOCAB, CANDIDATES)


def first_batch() -> BatchedDataDict:
    return rows().get_batch(0, GLOBAL_BATCH)


@cache
def learned(path: Path, kind: str) -> oracle.Learned:
    return oracle.Learned.of(
        path, rows(), GLOBAL_BATCH, lambda model, data: pairwise.hf_result(kind, model, data)[0]
    )


@cache
def measured(path: Path, kind: str) -> Exact:
    """The metrics of the first global batch before training."""

    def compute(model: Any) -> torch.Tensor:
        metrics = pairwise.hf_result(kind, model, first_batch())[1]
        return torch.stack([metrics[name].to(metrics["loss"]) for name in pairwise.NAMES])

    return Exact.of(path, compute)


def dispatcher_of(policy: MegatronPolicy) -> BatchDispatcher:
    architecture = bind_model(policy.config).architecture
    return BatchDispatcher.of(policy.config, policy.topology, architecture)


def dealt(policy: MegatronPolicy, loss: Any, step: BatchedDataDict) -> BatchedDataDict:
    """This data-parallel rank's rows as the driver deals them."""
    return dispatcher_of(policy).to_train(step, loss, GLOBAL_BATCH, 2)[policy.coords.dp]


def steps_of(policy: MegatronPolicy, case: Case, loss: Any) -> list[BatchedDataDict]:
    if not case.dealt:
        return own_steps(policy, rows())
    batches = [rows().get_batch(step, GLOBAL_BATCH) for step in range(STEPS)]
    return [dealt(policy, loss, batch) for batch in batches]


def study(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees that evaluates one global batch and trains on two."""
    loss = pairwise.LOSSES[case.loss]()
    with open_policy(config, init_reference_model=False) as policy:
        own = steps_of(policy, case, loss)
        sizes = {"gbs": GLOBAL_BATCH, "mbs": 2}
        return {
            "coords": policy.coords,
            "evaluated": policy.train(own[0], loss, eval_mode=True, **sizes),
            "steps": [policy.train(step, loss, **sizes) for step in own],
            "weights": learned_weights(policy),
        }


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_loss_of_pairs_is_that_of_the_whole_batch_in_one_process(
    ranks, checkpoints, case: Case
) -> None:
    """Losses, gradient norms, metrics and weights are as close as rounding allows."""
    path = checkpoints[TIED]
    expected = learned(path, case.loss)
    seen = ranks.run(LAYOUTS[case.layout].world, study, case, case.config(path))
    replicas = {each["coords"].dp: each["evaluated"]["microbatch_metrics"] for each in seen}
    assert max(len(metrics["pairs"]) for metrics in replicas.values()) > 1, "one microbatch alone"
    totals = [sum(sum(own[name]) for own in replicas.values()) for name in pairwise.NAMES]
    assert_equal("metrics", torch.tensor(totals), measured(path, case.loss), case.name)
    tp = LAYOUTS[case.layout].tp
    for each in seen:
        expected.assert_same_loss(each["evaluated"]["loss"], 0, case.name)
        expected.assert_same_steps(each["steps"], case.name)
        assert_same_shards(expected, path, tp, each["coords"].tp, each["weights"])


def taught_by_the_document(config: dict[str, Any], data: BatchedDataDict) -> list[dict[str, Any]]:
    """Steps on this rank's rows with the loss of docs/losses.md."""
    made: dict[str, Any] = {}
    exec(python_blocks("docs/losses.md")[2], made)
    loss = made["DPO"]()
    with open_policy(config, init_reference_model=False) as policy:
        batches = [data.get_batch(step, GLOBAL_BATCH) for step in range(STEPS)]
        own = [dealt(policy, loss, batch) for batch in batches]
        return [policy.train(step, loss, gbs=GLOBAL_BATCH, mbs=2) for step in own]


def dpo(model: Any, data: BatchedDataDict) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7, with a beta of 0.1, as a mean over pairs that count."""
    above_BS = oracle.hf_logprobs(model, data["input_ids"]) - data["reference_logprobs"][:, 1:]
    sums_B = (above_BS * data["token_mask"][:, 1:]).sum(-1)
    counts_P = data["sample_mask"].unflatten(0, (-1, 2))[:, 0]
    margins_P = sums_B.unflatten(0, (-1, 2)) @ sums_B.new_tensor([0.1, -0.1])
    return (torch.nn.functional.softplus(-margins_P) * counts_P).sum() / counts_P.sum()


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_loss_of_the_document_is_dpo(ranks, checkpoints, batching: str) -> None:
    data = rows() | {"reference_logprobs": rows()["reference"]}
    expected = oracle.Learned.of(checkpoints[TIED], data, GLOBAL_BATCH, dpo)
    config = Case("DP2", batching, "").config(checkpoints[TIED])
    for steps in ranks.run(2, taught_by_the_document, config, data):
        expected.assert_same_steps(steps)


def in_parts(config: dict[str, Any]) -> dict[str, Any]:
    """A step on the first global batch in parts of 2 and 6 rows."""
    loss = pairwise.PairsOfLogprobs()
    with open_policy(config, init_reference_model=False) as policy:
        dispatcher = dispatcher_of(policy)
        policy.accumulator.begin(loss, GLOBAL_BATCH, 2)
        for start, end in ((0, 2), (2, GLOBAL_BATCH)):
            part = first_batch().slice(start, end)
            shards = dispatcher.to_train_part(part, loss, 2)
            policy.accumulator.microbatch(shards[policy.coords.dp])
        with pytest.raises(BatchError, match="a batch of 1 rows cuts a group of 2 rows"):
            policy.accumulator.microbatch(first_batch().slice(0, 1))
        return {"coords": policy.coords, "step": policy.accumulator.finish()}


@pytest.mark.parametrize("batching", BATCHINGS)
def test_pairs_are_trained_in_parts_as_well(ranks, checkpoints, batching: str) -> None:
    case = Case("DP2", batching, "log-probabilities")
    seen = ranks.run(2, in_parts, case.config(checkpoints[TIED]))
    for each in seen:
        learned(checkpoints[TIED], case.loss).assert_same_steps([each["step"]])
    found = {each["coords"].dp: each["step"]["microbatch_metrics"]["pairs"] for each in seen}
    assert sum(map(sum, found.values())) == first_batch()["sample_mask"].sum() / 2


def _shift(rows_of: Any) -> Any:
    """Every pair has a row of the pair after it."""
    return lambda bins, groups: [
        [(row + row % 2 * 2) % (2 * len(groups)) for row in own] for own in rows_of(bins, groups)
    ]


def _reverse(share: Any) -> Any:
    def reversed_(*args: Any) -> Any:
        made = share(*args)
        return plan.RankPlan(tuple(row ^ 1 for row in made.rows), made.plan)

    return reversed_


APART = (plan, "_rows_of", _shift)
ROW_BY_ROW = (batching.Batcher, "for_loss", lambda old: lambda self, loss_fn: self)
BACKWARDS = (plan, "_share", _reverse)
ONE_BY_ONE = (Output, "logits", lambda logits: lambda self, at_once: logits(self, 1))
MUTATIONS: dict[str, tuple[tuple[Any, str, Any], str, str]] = {
    "rows of pairs are apart, packed": (APART, "packed", "log-probabilities"),
    "rows of pairs are apart, dynamic": (APART, "dynamic", "slices of logits"),
    "the planner does not ask the loss": (ROW_BY_ROW, "packed", "log-probabilities"),
    "nor for dynamic microbatches": (ROW_BY_ROW, "dynamic", "logits"),
    "the rejected row comes first": (BACKWARDS, "packed", "candidates and entropies"),
    "a loss of logits gets single rows": (ONE_BY_ONE, "packed", "logits"),
}


def study_broken(name: str, case: Case, config: dict[str, Any]) -> dict[str, Any]:
    try:
        with replaced(*MUTATIONS[name][0]):
            return study(case, config)
    except LossError as error:
        return {"refused": str(error)}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planner_that_separates_pairs_is_found(ranks, checkpoints, name: str) -> None:
    _, batching, kind = MUTATIONS[name]
    case = Case("one process", batching, kind, dealt=False)
    path = checkpoints[TIED]
    (seen,) = ranks.run(1, study_broken, name, case, case.config(path))
    if "refused" in seen:  # an odd number of rows, which cannot be halves of pairs
        assert "must match the size" in seen["refused"]
        return
    expected = learned(path, kind)
    for what, rounding, right in (
        ("loss", expected.rounding.loss, expected.exact.losses),
        ("grad_norm", expected.rounding.grad_norm, expected.exact.grad_norms),
    ):
        apart = abs(seen["steps"][0][what].item() / right[0] - 1)
        assert apart > 10 * ROOM * rounding, (name, what, apart)


class NoNumber(pairwise.PairsOfLogprobs):
    rows_per_group = 0


def refused(config: dict[str, Any], kind: str) -> None:
    """Everything that would separate a group is refused by name, and the policy goes on."""
    loss = pairwise.PairsOfLogprobs()
    with open_policy(config, init_reference_model=False) as policy:
        data = own_share(policy, rows()).slice(0, 4)

        def refuse(message: str, loss_fn: Any, own: BatchedDataDict, gbs: int, mbs: int) -> None:
            with pytest.raises(BatchError, match=message):
                policy.train(own, loss_fn, gbs=gbs, mbs=mbs)

        over = "gbs=6 over 2 ranks cuts a group of 2 rows.*multiple of 4"
        if kind != "padded":  # with as few rows, microbatches of 2 do not fit into 6 either
            refuse(over, loss, data.slice(0, 3).from_batches([data, data.slice(0, 2)]), 6, 2)
        refuse("a batch of 3 rows cuts a group of 2 rows", loss, data.slice(0, 3), 6, 1)
        with pytest.raises(LossError, match=r"NoNumber.rows_per_group is 0: make it the number"):
            policy.train(data, NoNumber(), gbs=8, mbs=2)
        if kind == "padded":
            refuse("mbs=1 cuts a group of 2 rows.*multiple of 2", loss, data, 8, 1)
        else:
            with_plan = BatchedDataDict(data)
            own = dealt(policy, pairwise.PairsOfLogprobs(), first_batch())
            with_plan.micro_batch_indices = [[[0, 4]]]
            with_plan.micro_batch_lengths = [[4 * LENGTH]]
            with_plan.elem_counts_per_gb = [4] if kind == "packed" else None
            refuse("does not say which of the caller's rows", loss, with_plan, 8, 2)
            for with_plan.caller_rows in ([0, 2, 1, 3], [1, 2, 3, 4]):
                refuse("separates rows that the loss reads together", loss, with_plan, 8, 2)
            assert own.size % 2 == 0 and own.caller_rows is not None
        assert policy.train(data, loss, gbs=8, mbs=2)["grad_norm"] > 0


@pytest.mark.parametrize("kind", BATCHINGS)
def test_what_would_separate_a_pair_is_refused_by_name(ranks, checkpoints, kind: str) -> None:
    ranks.run(2, refused, Case("DP2", kind, "logits").config(checkpoints[TIED]), kind)
