"""Batches that are malformed on one rank: refused on all by an error of ours, or computed with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import LOSSES, open_policy, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LENGTH, VOCAB
from tests.malformed import malformed

ROWS = 4
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
TOKENS = {"train_mb_tokens": 40, "logprob_mb_tokens": 40}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True} | TOKENS},
    "dynamic": {"dynamic_batching": {"enabled": True} | TOKENS},
}
FSDP2 = FSDP2_LAYOUTS["FSDP2 x 2"].megatron
GENERATING = {"generation": {"max_new_tokens": 2, "stop_token_ids": []}}
INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
MASKS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def good() -> BatchedDataDict:
    return oracle.make_batch(ROWS, LENGTH, VOCAB)


def outcome(call: Any, data: Any) -> str:
    try:
        call(data)
    except (BatchError, ConfigError) as error:
        return f"refused: {error}"
    return "computed"


def evaluate(policy: MegatronPolicy, data: Any) -> float:
    sizes = {"gbs": ROWS * policy.topology.dp, "mbs": 1}
    result = policy.train(data, LOSSES["sequence"](), eval_mode=True, **sizes)
    return float(result["loss"].sum())


def part(policy: MegatronPolicy, data: Any) -> None:
    policy.accumulator.begin(LOSSES["sequence"](), mbs=1)
    try:
        policy.accumulator.microbatch(data)
    finally:
        policy.accumulator.abort()


def train_on_malformed(config: dict[str, Any]) -> dict[str, str]:
    """Only the last rank's data are malformed; what each rank says of them."""
    with open_policy(config, init_reference_model=False) as policy:
        last = policy.rank == policy.topology.world_size - 1
        before = evaluate(policy, good())
        said = {}
        for name, data in malformed(good):
            mine = data if last else good()
            said[name] = outcome(lambda data: evaluate(policy, data), mine)
            said[f"part, {name}"] = outcome(lambda data: part(policy, data), mine)
        assert evaluate(policy, good()) == before
        return said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "megatron"),
    [
        pytest.param("padded", {}, id="padded"),
        # A batch is refused before any engine sees it.
        pytest.param("packed", FSDP2, id="FSDP2 x 2, packed"),
        pytest.param("packed", {}, id="packed"),
        pytest.param("dynamic", {}, id="dynamic"),
    ],
)
def test_every_malformed_batch_of_one_rank_is_refused_on_all_or_computed(
    ranks, checkpoints, kind: str, megatron: dict[str, Any]
) -> None:
    config = policy_config(checkpoints[True], megatron, **KINDS[kind])
    others, last = ranks.run(2, train_on_malformed, config)
    refused = [name for name, said in last.items() if said.startswith("refused")]
    assert len(refused) > 700
    for name, said in last.items():
        assert others[name].startswith("refused") == said.startswith("refused"), name
        key = name.removeprefix("part, ").partition(":")[0]
        if name in refused and ":" in name:
            assert key in said, f"{name}: {said}"


def read_malformed(config: dict[str, Any]) -> list[str]:
    with open_policy(config, tokenizer=TOKENIZER, init_optimizer=False) as policy:
        before = policy.logprobs(good())
        calls = {
            "log-probabilities": policy.logprobs,
            "entropy": policy.entropy,
            "the reference": policy.reference_logprobs,
            "top k": lambda data: policy.topk_logits(data, 2),
            "generation": policy.generate,
        }
        said = [outcome(call, data) for call in calls.values() for _, data in malformed(good)]
        for sizes in ("3", 2.5, -1, [1]):
            said.append(outcome(lambda n: policy.logprobs(good(), micro_batch_size=n), sizes))
            said.append(outcome(lambda n: policy.topk_logits(good(), n), sizes))
        assert torch.equal(policy.logprobs(good()), before)
        return said


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["packed", "dynamic", "padded"])
def test_every_malformed_batch_that_is_read_is_refused_or_computed(
    ranks, checkpoints, kind: str
) -> None:
    config = policy_config(checkpoints[True], {}, **KINDS[kind], **GENERATING)
    (said,) = ranks.run(1, read_malformed, config)
    assert len([each for each in said if each.startswith("refused")]) > 1000
    assert all(each.startswith("refused") for each in said[-8:])


def small_batch() -> BatchedDataDict:
    """Tokens that every dtype can hold."""
    data = good()
    data["input_ids"] = data["input_ids"] % 120
    return data


def train_on_dtypes(config: dict[str, Any]) -> dict[str, Any]:
    """The loss and log-probabilities by the dtype of tokens, lengths and masks."""
    with open_policy(config, init_reference_model=False) as policy:
        found = {}
        for key, dtypes in (
            ("input_ids", INTEGERS),
            ("input_lengths", INTEGERS),
            ("sample_mask", MASKS),
            ("token_mask", MASKS),
        ):
            for dtype in dtypes:
                data = small_batch()
                data[key] = data[key].to(dtype)
                found[key, str(dtype)] = (evaluate(policy, data), policy.logprobs(data))
        for dtype in INTEGERS[:1]:
            data = small_batch()
            data["input_ids"][1, 2] = VOCAB
            data["input_ids"] = data["input_ids"].to(dtype)
            found["outside"] = outcome(policy.logprobs, data)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_of_tokens_lengths_and_masks_gives_the_same_numbers(
    ranks, checkpoints, kind: str
) -> None:
    config = policy_config(checkpoints[True], {}, **KINDS[kind])
    (found,) = ranks.run(1, train_on_dtypes, config)
    assert f"token {VOCAB} in row 1 at position 2" in found.pop("outside")
    loss, logprobs = found["input_ids", "torch.int64"]
    # A mask in fp64 makes the loss a sum in fp64: of n terms, one in fp32 is at most n roundings
    # away. A mask that is read wrongly changes the weight of a token, and that is 1/n of the loss.
    terms = small_batch()["input_ids"].numel()
    rounding = terms * torch.finfo(torch.float32).eps / 2
    assert 10 * rounding < 1 / terms
    for name, (other, others) in found.items():
        assert torch.equal(others, logprobs), name
        assert other == pytest.approx(loss, rel=rounding), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_a_vocabulary_s_size_is_not_taken_for_a_number_of_the_tokens_dtype(dtype) -> None:
    """200 as int8 is -56, and every token would lie beyond it."""
    from megatron_policy.training.checks import checked_tokens

    for vocab in (200, 256, 40_000, 151_936):
        data = BatchedDataDict({"input_ids": torch.full((2, 3), 100, dtype=dtype)})
        assert checked_tokens(data, vocab).dtype == torch.int64
