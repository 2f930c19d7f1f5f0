"""What users get wrong: told by name before anything is computed, and the policy lives on."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, VOCAB
from tests.losses import Result, SequenceNLL

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


BATCHES: dict[str, tuple[Callable[[], BatchedDataDict], str]] = {
    "no tokens": (lambda: without("input_ids"), "'input_ids'"),
    "no sample mask": (lambda: without("sample_mask"), "'sample_mask'"),
    "a long mask": (
        lambda: with_value("token_mask", torch.ones(GLOBAL_BATCH, LENGTH + 1)),
        "'token_mask'",
    ),
    "few rows": (lambda: with_value("extra", torch.ones(GLOBAL_BATCH - 1)), "'extra'"),
    "a number": (lambda: with_value("extra", 3), "'extra'"),
    "nothing": (lambda: with_value("extra", None), "'extra'"),
    "a tensor without rows": (lambda: with_value("extra", torch.tensor(1.0)), "'extra'"),
    "a negative token": (lambda: with_token(-1), "row 2 at position 3"),
    "a token beyond the vocabulary": (lambda: with_token(VOCAB), "row 2 at position 3"),
    "float tokens": (lambda: with_value("input_ids", torch.ones(GLOBAL_BATCH, LENGTH)), "integers"),
}


def train_on_bad_batches(config: dict[str, Any]) -> dict[str, str]:
    said = {}
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        sizes = {"gbs": GLOBAL_BATCH * policy.topology.dp, "mbs": 1}
        for name, (make, _) in BATCHES.items():
            with pytest.raises(BatchError) as error:
                policy.train(make(), LOSSES["token"](), **sizes)
            said[name] = str(error.value)
        assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        policy.train(good(), LOSSES["token"](), **sizes)
    return said


@BOTH
def test_a_bad_batch_is_refused_by_the_name_of_what_is_wrong(ranks, checkpoints, megatron) -> None:
    for said in ranks.run(2, train_on_bad_batches, policy_config(checkpoints[True], megatron)):
        for name, (_, expected) in BATCHES.items():
            assert expected in said[name], f"{name}: {said[name]}"


def read_bad_batches(config: dict[str, Any]) -> list[str]:
    said = []
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        for call in (policy.logprobs, lambda data: policy.topk_logits(data, 2)):
            for data in (without("input_ids"), with_token(VOCAB)):
                with pytest.raises(BatchError) as error:
                    call(data)
                said.append(str(error.value))
    return said


@BOTH
def test_reading_names_the_token_that_the_model_does_not_know(ranks, checkpoints, megatron) -> None:
    for said in ranks.run(2, read_bad_batches, policy_config(checkpoints[True], megatron)):
        assert all("input_ids" in message for message in said)
        assert f"token {VOCAB} in row 2 at position 3" in said[1]


class Unfed(SequenceNLL):
    """Asks for what no policy feeds."""

    input_type = "draft"  # type: ignore[assignment]


class Distilling(SequenceNLL):
    """Reads a teacher's candidates, which the data lack."""

    candidates = "teacher_topk_indices"


def refuse_then_train(config: dict[str, Any]) -> list[str]:
    """What each of these says on this rank; the policy trains afterwards."""
    said = []
    with open_policy(config, init_reference_model=False) as policy:
        ragged = good()
        ragged.micro_batch_indices, ragged.micro_batch_lengths = [[[0, 1, 2]]], [[13]]
        first = policy.coords.dp == 0
        attempts: list[tuple[Any, Any, dict[str, Any]]] = [
            (good(), Unfed(), {}),
            (good(), Distilling(), {}),
            (good(), LOSSES["token"](), {"gbs": -8}),
            (good(), LOSSES["token"](), {"mbs": -1}),
            # Only one data-parallel rank has the bad data.
            (ragged if first else good(), LOSSES["token"](), {}),
        ]
        for data, loss, sizes in attempts:
            with pytest.raises((BatchError, NotImplementedError)) as error:
                policy.train(data, loss, **{"gbs": GLOBAL_BATCH, "mbs": 1} | sizes)
            said.append(str(error.value))
        share = own_share(policy, good())
        policy.train(share, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=1)
        return said


@pytest.mark.parametrize("name", ["PP2", "DP2", "FSDP2 x 2", "FSDP2 CP2"])
def test_what_no_rank_can_compute_is_refused_on_all_of_them(ranks, checkpoints, name: str) -> None:
    config = policy_config(checkpoints[True], (LAYOUTS | FSDP2_LAYOUTS)[name].megatron)
    seen = ranks.run(2, refuse_then_train, config)
    for unfed, distilling, gbs, mbs, _ in seen:
        assert "'draft'" in unfed and "teacher_topk_indices" in distilling
        assert "gbs is -8" in gbs and "mbs is -1" in mbs
    assert "micro_batch_indices" in seen[0][4]
    replicas = name in ("DP2", "FSDP2 x 2")
    other = "another data-parallel rank" if replicas else "micro_batch_indices"
    assert other in seen[1][4]


class WordyLoss(SequenceNLL):
    """Returns a metric that is not a number."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss, metrics | {"comment": "fine"}


def train_with_words(config: dict[str, Any]) -> str:
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        with pytest.raises(BatchError) as error:
            policy.train(own_share(policy, good()), WordyLoss(), mbs=1)
        assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        policy.train(own_share(policy, good()), LOSSES["token"](), mbs=1)
        return str(error.value)


@pytest.mark.parametrize("name", ["PP2", "FSDP2 x 2"])
def test_a_metric_that_is_no_number_is_refused_before_the_step(ranks, checkpoints, name) -> None:
    config = policy_config(checkpoints[True], (LAYOUTS | FSDP2_LAYOUTS)[name].megatron)
    for message in ranks.run(2, train_with_words, config):
        assert "'comment'" in message


def train_on_masked(config: dict[str, Any], loss: str) -> tuple[float, float]:
    data = good()
    data["sample_mask"] = torch.zeros(GLOBAL_BATCH)
    with open_policy(config, init_reference_model=False) as policy:
        result = policy.train(own_share(policy, data), LOSSES[loss](), mbs=1)
        return result["loss"].item(), result["grad_norm"].item()


@BOTH
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_batch_of_masked_samples_has_no_gradient(ranks, checkpoints, loss, megatron) -> None:
    for seen in ranks.run(2, train_on_masked, policy_config(checkpoints[True], megatron), loss):
        assert seen == (0.0, 0.0)


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


def interrupted_exchange(config: dict[str, Any]) -> bool:
    """Whether the policy's weights survive an interrupt in the middle of an exchange."""
    from megatron_policy.device import exchange

    with open_policy(config) as policy:
        policy.train(good(), LOSSES["token"](), mbs=1)
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        original, calls = exchange._to_pieces, iter(range(1000))

        def interrupted(*arguments: Any) -> None:
            if next(calls) == 5:
                raise KeyboardInterrupt
            original(*arguments)

        exchange._to_pieces = interrupted
        try:
            with pytest.raises(KeyboardInterrupt), policy.reference():
                raise AssertionError("the exchange was to be interrupted")
        finally:
            exchange._to_pieces = original
        return all(torch.equal(before[name], p) for name, p in policy.named_parameters())


@pytest.mark.parametrize("megatron", [{}, FSDP2], ids=["Megatron-Core", "FSDP2"])
def test_an_interrupted_exchange_is_undone(ranks, checkpoints, megatron) -> None:
    config = policy_config(checkpoints[False], megatron)
    assert ranks.run(1, interrupted_exchange, config) == [True]
