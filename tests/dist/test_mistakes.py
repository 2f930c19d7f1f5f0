"""What users get wrong, also on one rank alone: told by name on all ranks before anything is
computed, or computed with; and the policy lives on.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.errors import BatchError, ConfigError, ConversionError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.shortcuts import dynamic, packed
from tests.losses import SequenceNLL
from tests.malformed import malformed

TP2, FSDP2 = LAYOUTS["TP2"].megatron, FSDP2_LAYOUTS["FSDP2 x 2"].megatron
BOTH = pytest.mark.parametrize("megatron", [TP2, FSDP2], ids=["TP2", "FSDP2 x 2"])


def good() -> BatchedDataDict:
    return oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def with_value(key: str, value: Any) -> BatchedDataDict:
    data = good()
    data.data[key] = value
    return data


def without(key: str) -> BatchedDataDict:
    data = good()
    del data[key]
    return data


def with_token(token: int) -> BatchedDataDict:
    data = good()
    data["input_ids"] = data["input_ids"].clone()
    data["input_ids"][2, 3] = token
    return data


BATCHES: dict[str, tuple[BatchedDataDict, str]] = {
    "no tokens": (without("input_ids"), "'input_ids'"),
    "no sample mask": (without("sample_mask"), "'sample_mask'"),
    "a long mask": (with_value("token_mask", torch.ones(GLOBAL_BATCH, LENGTH + 1)), "'token_mask'"),
    "few rows": (with_value("extra", torch.ones(GLOBAL_BATCH - 1)), "'extra'"),
    "a number": (with_value("extra", 3), "'extra'"),
    "nothing": (with_value("extra", None), "'extra'"),
    "a tensor without rows": (with_value("extra", torch.tensor(1.0)), "'extra'"),
    "a negative token": (with_token(-1), "row 2 at position 3"),
    "a token beyond the vocabulary": (with_token(VOCAB), f"token {VOCAB} in row 2 at position 3"),
    "float tokens": (with_value("input_ids", torch.ones(GLOBAL_BATCH, LENGTH)), "integers"),
}
READ = ("no tokens", "a token beyond the vocabulary")
"""Those of what reading needs."""


def use_bad_batches(config: dict[str, Any]) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        sizes = {"gbs": GLOBAL_BATCH * policy.topology.dp, "mbs": 1}
        train = partial(policy.train, loss_fn=LOSSES["token"](), **sizes)
        for name, (data, message) in BATCHES.items():
            reading = [policy.logprobs, partial(policy.topk_logits, k=2)] * (name in READ)
            for call in (train, *reading):
                with pytest.raises(BatchError, match=re.escape(message)):
                    call(data)
        assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        train(good())


@BOTH
def test_a_bad_batch_is_refused_by_the_name_of_what_is_wrong(ranks, checkpoints, megatron) -> None:
    ranks.run(2, use_bad_batches, policy_config(checkpoints[True], megatron))


class Unfed(SequenceNLL):
    """Asks for what no policy feeds."""

    input_type = "draft"  # type: ignore[assignment]


class Distilling(SequenceNLL):
    """Reads a teacher's candidates, which the data lack."""

    candidates = "teacher_topk_indices"


def refuse_then_train(config: dict[str, Any]) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        ragged, token = good(), LOSSES["token"]()
        ragged.micro_batch_indices, ragged.micro_batch_lengths = [[[0, 1, 2]]], [[13]]
        # Only one data-parallel rank has the bad data.
        own = (ragged, "micro_batch_indices"), (good(), "another data-parallel rank")
        data, message = own[policy.coords.dp]
        attempts: list[tuple[Any, Any, dict[str, Any], str]] = [
            (good(), Unfed(), {}, "'draft'"),
            (good(), Distilling(), {}, "teacher_topk_indices"),
            (good(), token, {"gbs": -8}, "gbs is -8"),
            (good(), token, {"mbs": -1}, "mbs is -1"),
            (data, token, {}, message),
        ]
        for data, loss, sizes, message in attempts:
            with pytest.raises((BatchError, NotImplementedError), match=message):
                policy.train(data, loss, **{"gbs": GLOBAL_BATCH, "mbs": 1} | sizes)
        policy.train(own_share(policy, good()), token, gbs=GLOBAL_BATCH, mbs=1)


@pytest.mark.parametrize("name", ["PP2", "DP2", "FSDP2 x 2", "FSDP2 CP2"])
def test_what_no_rank_can_compute_is_refused_on_all_of_them(ranks, checkpoints, name: str) -> None:
    config = policy_config(checkpoints[True], (LAYOUTS | FSDP2_LAYOUTS)[name].megatron)
    ranks.run(2, refuse_then_train, config)


def fail_then_open(bad: dict[str, Any], config: dict[str, Any]) -> str:
    prepare_platform()
    with pytest.raises(ConversionError) as error:
        MegatronPolicy(bad, timeout_s=120.0)
    assert not torch.distributed.is_initialized()
    first = MegatronPolicy(config, timeout_s=120.0)
    first.shutdown()
    policy = MegatronPolicy(config, timeout_s=120.0)
    first.shutdown()
    MegatronPolicy(config, timeout_s=120.0).shutdown()  # a process can have several
    policy.train(good(), LOSSES["token"](), mbs=1)
    policy.shutdown()
    for call in (policy.logprobs, lambda data: policy.train(data, LOSSES["token"](), mbs=1)):
        with pytest.raises(ConfigError, match="shut down"):
            call(good())
    return str(error.value)


@pytest.mark.parametrize("megatron", [{}, FSDP2], ids=["Megatron-Core", "FSDP2"])
def test_a_policy_can_be_made_after_one_that_failed(ranks, checkpoints, tmp_path, megatron) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen2", vocab=VOCAB)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.surprise": torch.zeros(2)}, path / "model.safetensors")
    bad, config = (policy_config(p, megatron) for p in (path, checkpoints[True]))
    (message,) = ranks.run(1, fail_then_open, bad, config)
    assert "model.surprise" in message


LONGEST = 32


def rows(longest: int, width: int) -> BatchedDataDict:
    data = oracle.make_batch(GLOBAL_BATCH, longest, VOCAB)
    for key in ("input_ids", "token_mask"):
        data[key] = torch.nn.functional.pad(data[key], (0, width - longest))
    return data


def use_long_rows(config: dict[str, Any], length: int, limits: str) -> None:
    """Rows one token too long are refused, and those that fit are read, padded wider."""
    too_long = rf"row 0 has {length + 1} tokens.*{limits}"
    without_lengths = rf"has {length + 8} tokens \(there are no input_lengths\).*{limits}"
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        long, fitting = rows(length + 1, length + 8), rows(length, length)
        for call, data, message in (
            (partial(policy.train, loss_fn=LOSSES["token"](), mbs=1), long, too_long),
            (partial(policy.train, loss_fn=LOSSES["token"](), eval_mode=True), long, too_long),
            (policy.logprobs, long, too_long),
            (partial(policy.topk_logits, k=2), long, too_long),
            (policy.logprobs, {"input_ids": long["input_ids"]}, without_lengths),
        ):
            with pytest.raises(BatchError, match=f"(?s){message}"):
                call(data)
        assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        for wrong in (True, 1.0, -1):
            with pytest.raises(
                BatchError, match=f"scored at once, is {wrong}: pass a whole number"
            ):
                policy.logprobs(fitting, micro_batch_size=wrong)
            with pytest.raises(BatchError, match=f"k is {wrong}; it must be a whole number"):
                policy.topk_logits(fitting, wrong)
        wider = policy.logprobs(rows(length, length + 8))[:, :length]
        torch.testing.assert_close(wider, policy.logprobs(fitting), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("positions", "length"), [(512, LONGEST), (20, 20)])
def test_rows_that_are_too_long_are_refused_and_padding_is_not(
    ranks, checkpoint, positions: int, length: int
) -> None:
    path = checkpoint("qwen3", max_position=positions, **SIZES)
    limits = f"max_total_sequence_length={LONGEST} and the model's {positions} positions"
    ranks.run(1, use_long_rows, policy_config(path, {}), length, limits)


ROWS = 4
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
KINDS: dict[str, dict[str, Any]] = {"padded": {}, "packed": packed(), "dynamic": dynamic()}
GENERATING = {"generation": {"max_new_tokens": 2, "stop_token_ids": []}}
SMALLER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = (*SMALLER, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASKS = (torch.bool, *SMALLER, *FLOATS)


def four_rows() -> BatchedDataDict:
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
        before = evaluate(policy, four_rows())
        said = {}
        for name, data in malformed(four_rows):
            mine = data if last else four_rows()
            said[name] = outcome(lambda data: evaluate(policy, data), mine)
            said[f"part, {name}"] = outcome(lambda data: part(policy, data), mine)
        assert evaluate(policy, four_rows()) == before
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
        before = policy.logprobs(four_rows())
        most = partial(policy.topk_logits, k=2)
        calls = (policy.logprobs, policy.entropy, policy.reference_logprobs, most, policy.generate)
        said = [outcome(call, data) for call in calls for _, data in malformed(four_rows)]
        for sizes in ("3", 2.5, -1, [1]):
            said.append(outcome(lambda n: policy.logprobs(four_rows(), micro_batch_size=n), sizes))
            said.append(outcome(lambda n: policy.topk_logits(four_rows(), n), sizes))
        assert torch.equal(policy.logprobs(four_rows()), before)
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
    data = four_rows()
    data["input_ids"] = data["input_ids"] % 120
    return data


def train_on_dtypes(config: dict[str, Any]) -> dict[str, Any]:
    """The loss and log-probabilities by the dtype of tokens, lengths and masks."""
    with open_policy(config, init_reference_model=False) as policy:
        found: dict[Any, Any] = {}
        integers = product(("input_ids", "input_lengths"), INTEGERS)
        for key, dtype in (*integers, *product(("sample_mask", "token_mask"), MASKS)):
            data = small_batch()
            data[key] = data[key].to(dtype)
            found[key, str(dtype)] = (evaluate(policy, data), policy.logprobs(data))
        data = small_batch()
        data["input_ids"][1, 2] = VOCAB
        data["input_ids"] = data["input_ids"].to(torch.uint8)
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
