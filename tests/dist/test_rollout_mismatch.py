"""Training measures how far its log-probabilities are from those in its data of the engine that
sampled the rows: under every layout and batching, for every kind of loss and way to train, the
numbers of one process of transformers; where, of which weights, and what happens where it cannot.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from megatron_policy.monitoring import JsonlWriter, compare_rollouts
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP1_LAYOUTS, FSDP2_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB, layout
from tests.dist.shortcuts import dynamic, packed
from tests.exact import load_hf
from tests.losses import SequenceNLL, loss_mask
from tests.margins import check

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
BOUND, ROUNDING = 0.25, 2e-5
"""The rounding of log-probabilities in fp32, and so of their distances, of which none is that near
the bound; the divergence has a slope below 1 at these.
"""
KEYS = {
    "token": "rollout_log_probs",
    "sequence": "generation_logprobs",
    "logit": "rollout_log_probs",
}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron, {}),
    "DP2": (2, {}, {}),
    "CP2": (2, layout(2, context_parallel_size=2).megatron, {}),
    "PP2": (2, LAYOUTS["PP2"].megatron, {}),
    "PP2xVPP2, dynamic": (2, LAYOUTS["PP2xVPP2"].megatron, dynamic()),
    "DP2, packed": (2, {}, packed()),
    "CP2, packed": (2, layout(2, context_parallel_size=2).megatron, packed()),
    "PP2xDP2, packed": (4, LAYOUTS["PP2"].megatron, packed()),
    "FSDP2 x 2, dynamic": (2, FSDP2_LAYOUTS["FSDP2 x 2"].megatron, dynamic()),
    "FSDP1 x 2": (2, FSDP1_LAYOUTS["FSDP1 x 2"].megatron, {}),
}


def config_of(path: Path, megatron: dict[str, Any], **top: Any) -> dict[str, Any]:
    mismatch = {"bound": BOUND, "by_position": True}
    return policy_config(path, megatron, rollout_mismatch=mismatch, **top)


def batch_of(path: Path, key: str = "generation_logprobs") -> BatchedDataDict:
    """Two global batches. The engine's log-probabilities are those of transformers, in fp64, and
    what is at least `ROUNDING` more or less; two of the tokens that count have none, and what does
    not count has anything.
    """
    data, random = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB), torch.Generator()
    with torch.no_grad():
        model = load_hf(path, torch.float64)
        exact_BS = model(data["input_ids"]).logits[:, :-1].log_softmax(-1)
    exact_BS = exact_BS.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    noise_BS = 0.3 * torch.randn(exact_BS.shape, generator=random.manual_seed(3))
    near_BS = (noise_BS.abs() - BOUND).abs() < 4 * ROUNDING
    rollout_BS = torch.zeros(data["input_ids"].shape).fill_(math.nan)
    counted_BS = loss_mask(data) != 0
    rollout_BS[:, 1:][counted_BS] = (exact_BS + noise_BS.masked_fill(near_BS, 0.0))[
        counted_BS
    ].float()
    for row, value in ((0, math.nan), (GLOBAL_BATCH - 1, -math.inf)):
        data["sample_mask"][row] = 1
        position = int((data["token_mask"][row, 1:] != 0).nonzero()[0]) + 1
        rollout_BS[row, position:] = rollout_BS[row, position:].nan_to_num(-1.0, -1.0, -1.0)
        rollout_BS[row, position] = value
    return BatchedDataDict(
        data | {key: rollout_BS, "exact": torch.nn.functional.pad(exact_BS, (1, 0))}
    )


def expected(data: BatchedDataDict, key: str = "generation_logprobs") -> dict[str, float]:
    """Every number by a loop over the tokens of `data`."""
    found, lost = [], 0
    for row, s in (loss_mask(data) != 0).nonzero().tolist():
        train, rollout = data["exact"][row, s + 1].item(), data[key][row, s + 1].item()
        if math.isfinite(rollout):
            found.append((s + 1, train - rollout))
        else:
            lost += 1
    distances = [abs(each) for _, each in found]
    numbers: dict[str, float] = {
        "logprob_abs_diff": sum(distances) / len(found),
        "logprob_abs_diff_max": max(distances),
        "kl": sum(math.exp(each) - 1 - each for _, each in found) / len(found),
        "share_beyond": (lost + sum(each > BOUND for each in distances)) / (lost + len(found)),
        "tokens": len(found),
        "not_finite": lost,
    }
    for first, last in ((1, 1), (2, 3), (4, 7), (8, 15)):
        own = [abs(each) for s, each in found if first <= s <= last]
        if own:
            numbers[f"logprob_abs_diff_from_{first if first > 1 else 0}"] = sum(own) / len(own)
    return {f"train_rollout_{name}": number for name, number in numbers.items()}


def assert_near(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert list(found) == list(wanted)
    for name, number in wanted.items():
        exact = name.endswith(("tokens", "not_finite", "share_beyond"))
        assert not exact or found[name] == number, name
        check("rollout mismatch", abs(found[name] - number), ROUNDING)


def part(data: BatchedDataDict, number: int) -> BatchedDataDict:
    return data.slice(number * GLOBAL_BATCH, (number + 1) * GLOBAL_BATCH)


def plain(data: BatchedDataDict) -> BatchedDataDict:
    return BatchedDataDict({key: value for key, value in data.items() if key != "exact"})


def in_parts(policy: MegatronPolicy, data: BatchedDataDict, loss: str) -> dict[str, Any]:
    own = own_share(policy, data)
    policy.accumulator.begin(LOSSES[loss](), gbs=GLOBAL_BATCH, mbs=1)
    for rows in ((0, own.size // 2), (own.size // 2, own.size)):
        policy.accumulator.microbatch(own.slice(*rows))
    policy.accumulator.microbatch({})
    return policy.accumulator.finish()


def measure(config: dict[str, Any], data: dict[str, BatchedDataDict], folder: str) -> Any:
    """By kind of loss: what training, evaluating, training in parts and a report have."""
    found: dict[str, Any] = {}
    writer = JsonlWriter(f"{folder}/metrics.jsonl")
    with open_policy(config, init_reference_model=False, writers=[writer]) as policy:
        for loss, batch in data.items():
            mbs = GLOBAL_BATCH // policy.topology.dp // 4
            own = own_share(policy, plain(batch))
            kinds = {"eval": policy.train(own, LOSSES[loss](), eval_mode=True, mbs=mbs)}
            found[loss] = kinds
        for loss in ("sequence", "token"):
            kinds = found[loss]
            own = own_share(policy, plain(data[loss]))
            if loss == "sequence":
                kinds["train"] = policy.train(own, LOSSES[loss](), mbs=mbs)
                kinds["report"] = policy.report().mismatch
            else:
                kinds["parts"] = in_parts(policy, plain(part(data[loss], 0)), loss)
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_layout_measures_what_one_process_of_transformers_does(
    ranks, checkpoint, tmp_path, name: str
) -> None:
    world, megatron, top = CASES[name]
    path = checkpoint("qwen2", **SIZES)
    data = {loss: batch_of(path, key) for loss, key in KEYS.items()}
    # Of the second step's rows nothing is measured: its weights are not those that sampled.
    seen = ranks.run(world, measure, config_of(path, megatron, **top), data, str(tmp_path))
    for found in seen:
        for loss, key in KEYS.items():
            assert_near(found[loss]["eval"]["rollout_mismatch"], expected(data[loss], key))
        first = expected(part(data["sequence"], 0))
        assert first["train_rollout_not_finite"] == 2
        assert_near(found["sequence"]["train"]["rollout_mismatch"], first)
        assert found["sequence"]["report"] == seen[0]["sequence"]["train"]["rollout_mismatch"]
        assert {"lr", "loss"} <= found["sequence"]["train"]["microbatch_metrics"].keys()
        assert not any("rollout" in key for key in found["sequence"]["train"]["microbatch_metrics"])
        # The steps before have moved the weights: as many tokens, at another distance.
        moved = found["token"]["parts"]["rollout_mismatch"]
        assert moved["train_rollout_tokens"] == first["train_rollout_tokens"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated, trained = records[0], records[3]
    for record, kind, loss in ((evaluated, "eval", "token"), (trained, "train", "sequence")):
        mismatch = seen[0][loss][kind]["rollout_mismatch"]
        assert {key: record[f"{kind}/{key}"] for key in mismatch} == mismatch


class Changing(SequenceNLL):
    """Leaves other numbers in what it was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        kwargs["next_token_logprobs"].fill_(-1.0)
        return result


def of_the_first_weights(config: dict[str, Any], data: BatchedDataDict) -> Any:
    """The same without another pass as with one, whatever the loss does, in parts too; a step that
    is skipped; a share of the rows without log-probabilities; and wrong ones, after which the
    policy goes on.
    """
    found: dict[str, Any] = {}
    with open_policy(config, init_reference_model=False) as policy:
        own = own_share(policy, plain(data))
        read = compare_rollouts(
            policy.logprobs(own),
            own["generation_logprobs"],
            torch.nn.functional.pad(loss_mask(own), (1, 0)),
            bound=BOUND,
            by_position=True,
        )
        found["read"] = read.metrics()
        found["eval"] = policy.train(own, Changing(), eval_mode=True)
        found["parts"] = in_parts(policy, plain(part(data, 0)), "sequence")
    with open_policy(config, init_reference_model=False) as policy:
        empty = BatchedDataDict(plain(data))
        empty["token_mask"] = data["token_mask"].clone()
        empty["token_mask"][:GLOBAL_BATCH] = 0
        found["skipped"] = policy.train(own_share(policy, empty), LOSSES["sequence"]())
        nothing = empty.slice(0, GLOBAL_BATCH)
        found["nothing"] = policy.train(own_share(policy, nothing), LOSSES["sequence"]())
    with open_policy(config, init_reference_model=False) as policy:
        lacking = BatchedDataDict(own_share(policy, plain(data)))
        if policy.coords.dp:
            del lacking["generation_logprobs"]
        found["lacking"] = policy.train(lacking, LOSSES["sequence"](), eval_mode=True)
        if policy.coords.dp:
            lacking["generation_logprobs"] = torch.zeros(len(lacking["input_ids"]))
        with pytest.raises(BatchError) as refused:
            policy.train(lacking, LOSSES["sequence"]())
        found["refused"] = str(refused.value)
        del lacking["generation_logprobs"]
        found["without"] = policy.train(lacking, LOSSES["sequence"]())
        found["report"] = policy.report().mismatch
    return found


def test_it_is_of_the_weights_that_a_call_begins_with_and_of_the_rows_that_have_it(
    ranks, checkpoint
) -> None:
    path = checkpoint("qwen2", **SIZES)
    data = batch_of(path)
    first, second, both = expected(part(data, 0)), expected(part(data, 1)), expected(data)
    for rank, found in enumerate(ranks.run(2, of_the_first_weights, config_of(path, {}), data)):
        own = data.shard_by_batch_size(2, GLOBAL_BATCH)
        assert_near(found["read"], expected(own[rank]))
        assert_near(found["eval"]["rollout_mismatch"], both)
        assert_near(found["parts"]["rollout_mismatch"], first)
        assert found["skipped"]["skipped_steps"] == 1
        assert_near(found["skipped"]["rollout_mismatch"], second)
        assert found["nothing"]["rollout_mismatch"] == {
            "train_rollout_tokens": 0,
            "train_rollout_not_finite": 0,
        }
        assert_near(found["lacking"]["rollout_mismatch"], expected(own[0]))
        assert "generation_logprobs" in found["refused"] or rank == 0
        assert "rollout_mismatch" not in found["without"] and found["report"] is None


def with_filters(config: dict[str, Any], data: BatchedDataDict, loss: str) -> tuple[Any, int]:
    with open_policy(config, init_reference_model=False) as policy:
        own = own_share(policy, plain(data))
        read = policy.logprobs(own)
        dropped = int(((read[:, 1:] == 0) & (loss_mask(own) != 0)).sum())
        return policy.train(own, LOSSES[loss](), eval_mode=True), dropped


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_token_that_trainings_filters_drop_is_not_taken_for_a_certain_one(
    ranks, checkpoint, loss: str
) -> None:
    """Its log-probability is 0 in losses, which would be the probability 1."""
    path = checkpoint("qwen2", **SIZES)
    data = batch_of(path)
    rollout_BS = data["generation_logprobs"]
    data["generation_logprobs"] = torch.full_like(rollout_BS, -1.0)
    generation = {"max_new_tokens": 4, "top_p": 0.5}
    config = config_of(path, LAYOUTS["TP2"].megatron, generation=generation)
    tokens = int((loss_mask(data) != 0).sum())
    for result, dropped in ranks.run(2, with_filters, config, data, loss):
        found = result["rollout_mismatch"]
        assert 0 < found["train_rollout_not_finite"] == dropped < tokens
        assert found["train_rollout_tokens"] == tokens - dropped


def of_its_own_answers(config: dict[str, Any], data: BatchedDataDict) -> tuple[Any, int, Any]:
    with open_policy(config, tokenizer=TOKENIZER, init_reference_model=False) as policy:
        lengths = data["input_lengths"].clamp(max=4)
        made = policy.generate(BatchedDataDict(input_ids=data["input_ids"], input_lengths=lengths))
        positions = torch.arange(made.tokens_BT.size(1))
        ends = made.lengths_B
        answers = BatchedDataDict(
            input_ids=made.tokens_BT,
            input_lengths=ends,
            token_mask=(positions >= lengths.unsqueeze(1)) & (positions < ends.unsqueeze(1)),
            sample_mask=torch.ones(len(lengths)),
            generation_logprobs=made.logprobs_BT,
        )
        results = []
        for temperature in (None, 1.0):
            found = policy.train(
                answers, LOSSES["sequence"](), eval_mode=True, temperature=temperature
            )
            results.append(found["rollout_mismatch"])
        return results[0], int(made.generated_B.sum()), results[1]


def test_a_policys_own_answers_are_as_probable_in_training_at_their_temperature(
    ranks, checkpoint
) -> None:
    path = checkpoint("qwen2", **SIZES)
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    generation = {"max_new_tokens": 6, "temperature": 0.5, "top_k": 40}
    config = config_of(path, LAYOUTS["TP2"].megatron, generation=generation)
    for found, tokens, hotter in ranks.run(2, of_its_own_answers, config, data):
        assert found["train_rollout_tokens"] == tokens
        assert found["train_rollout_logprob_abs_diff_max"] < ROUNDING
        assert hotter["train_rollout_logprob_abs_diff"] > BOUND


def without_a_comparison(config: dict[str, Any], data: BatchedDataDict) -> tuple[Any, Any]:
    odd = data | {"generation_logprobs": torch.zeros(*data["input_ids"].shape, 3)}
    with open_policy(config, init_reference_model=False) as policy:
        evaluated = [policy.train(of, LOSSES["token"](), eval_mode=True) for of in (data, odd)]
        return evaluated, policy.report().mismatch


def test_nothing_is_compared_where_the_configuration_says_so(ranks, checkpoint) -> None:
    """Nor refused: under these names there may be something else."""
    path = checkpoint("qwen2", **SIZES)
    config = config_of(path, {}) | {"rollout_mismatch": {"enabled": False}}
    ((results, reported),) = ranks.run(1, without_a_comparison, config, batch_of(path))
    assert reported is None and not any("rollout_mismatch" in result for result in results)
