"""The reference policy: frozen, exchanged and given back whatever happens. One that the
configuration names is another checkpoint, or other adapters on the same one, under every layout,
before and after steps and loads; and what cannot be one.
"""

from __future__ import annotations

import gc
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import exchange
from megatron_policy.errors import ConfigError
from megatron_policy.memory import host_copies
from megatron_policy.memory.states import IDLE, LOGPROB, TRAIN
from tests import oracle, peft_models, scalar_oracle
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    UNUSED,
    open_policy,
    own_share,
    own_steps,
    policy_config,
)
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FAMILIES,
    FSDP2_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
)
from tests.dist.resuming import paths, replaced, resumed, weights_of
from tests.dist.test_adapter_handover import altered
from tests.dist.test_adapters import ALL, adapted
from tests.dist.test_export import tensors_of
from tests.exact import Exact, InDouble, assert_equal

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}


def batches(steps: int = 2) -> BatchedDataDict:
    return oracle.make_batch(steps * GLOBAL_BATCH, LENGTH, VOCAB)


def read_of(data: BatchedDataDict) -> BatchedDataDict:
    return BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def train(config: dict[str, Any], data: BatchedDataDict, root: Path | None) -> dict[str, Any]:
    """What the reference and the policy compute around two steps; with `root` a checkpoint of them
    is saved there.
    """
    read = read_of(data)
    with open_policy(config) as policy:
        seen = {
            "start": {name: tensor.clone() for name, tensor in policy.export()},
            "adapters": {},
            "before": policy.reference_logprobs(read),
            "own before": policy.logprobs(read),
        }
        if config["megatron_cfg"].get("peft"):
            seen["adapters"] = {n: t.clone() for n, t in policy.export(adapters=True)}
        for batch in own_steps(policy, data):
            policy.train(batch, LOSSES["token"](), mbs=1)
        policy.memory.enter(IDLE)
        policy.memory.enter(LOGPROB)
        trained = weights_of(policy)
        seen["after"] = policy.reference_logprobs(read)
        seen["unchanged"] = same(weights_of(policy), trained)
        seen["own after"] = policy.logprobs(read)
        if root is not None:
            policy.memory.enter(TRAIN)
            policy.save_checkpoint(**paths(root))
        return seen


def exact_of(path: Path, data: BatchedDataDict, load: Any = None) -> Exact:
    """What transformers makes of the rows with that checkpoint; `load` loads it."""
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    if load is None:
        return Exact.of(path, read)
    with torch.no_grad():
        rounded, double = read(load(path)), load(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, read(double))


def assert_read(found: torch.Tensor, exact: Exact, data: BatchedDataDict, what: str) -> None:
    """Equal where rows have tokens: packing leaves the rest out."""
    inside = torch.arange(1, LENGTH) < data["input_lengths"].unsqueeze(1)
    there = Exact(torch.where(inside, exact.value, 0.0), exact.rounding)
    assert_equal(what, torch.where(inside, found[:, 1:], 0.0), there)


def assert_around(seen: dict[str, Any], reference: Exact, own: Exact, data: Any) -> None:
    assert_read(seen["before"], reference, data, "reference logprobs")
    assert torch.equal(seen["before"], seen["after"])
    assert_read(seen["own before"], own, data, "logprobs at the start")
    assert seen["unchanged"] and not torch.equal(seen["own before"], seen["own after"])


LAYOUTS_OF: list[tuple[str, str, dict[str, Any]]] = [
    *((name, family, {}) for name in LAYOUTS for family in FAMILIES.values()),
    *((name, FAMILIES[True], PACKED) for name in ("TP2xCP2+SP", "DP2", "PP2xVPP2")),
    *((name, "qwen3_moe", {}) for name in EXPERT_LAYOUTS),
]


@pytest.mark.parametrize(("name", "family", "top"), LAYOUTS_OF)
def test_the_reference_is_the_checkpoint_that_is_named(
    ranks, checkpoint, name: str, family: str, top: dict[str, Any]
) -> None:
    path, other = two_models(checkpoint, family)
    data, case = batches(), (LAYOUTS | EXPERT_LAYOUTS)[name]
    config = policy_config(path, case.megatron, reference_model_name=str(other), **top)
    before = tensors_of(path)
    for seen in ranks.run(case.world, train, config, data, None):
        assert_around(seen, exact_of(other, data), exact_of(path, data), data)
        assert same(seen["start"], before)


def two_models(checkpoint, family: str) -> tuple[Path, Path]:
    sizes = SIZES | {"tied": family == FAMILIES[True]}
    return checkpoint(family, **sizes), checkpoint(family, seed=3, **sizes)


WITH_ADAPTERS: list[tuple[str, dict[str, Any], bool]] = [
    ("one process", {}, False),
    ("TP2+SP", {}, True),
    ("PP2xVPP2", {}, False),
    ("DP2 distributed optimizer, both overlaps", {}, True),
    ("TP2xCP2+SP", PACKED, False),
    ("TP2xPP2xDP2+SP", {}, True),
    ("TP2xPP2xDP2+SP", PACKED, False),
    ("one process", {}, True),
]


@pytest.mark.parametrize(("name", "top", "merged"), WITH_ADAPTERS)
def test_a_policy_with_adapters_has_the_reference_that_is_named(
    ranks, checkpoint, tmp_path, name: str, top: dict[str, Any], merged: bool
) -> None:
    """Other adapters on the same base, or a whole checkpoint beside which adapters are off."""
    path, other = two_models(checkpoint, FAMILIES[True])
    first = peft_models.make_adapters(path, tmp_path / "first", ALL)
    start = peft_models.make_adapters(path, tmp_path / "start", ALL, seed=5)
    data, case, load = batches(), LAYOUTS[name], peft_models.Loads
    expected = exact_of(other, data) if merged else exact_of(path, data, load(first))
    config = adapted(path, case.megatron, start, target_modules=ALL) | top
    config["reference_model_name"] = str(other if merged else first)
    adapters = peft_models.load_file(start / "adapter_model.safetensors")
    for seen in ranks.run(case.world, train, config, data, None):
        assert_around(seen, expected, exact_of(path, data, load(start)), data)
        assert same(seen["adapters"], adapters)


def resume(config: dict[str, Any], data: BatchedDataDict, root: Path) -> dict[str, Any]:
    read = read_of(data)
    with resumed(config, root) as policy:
        return {"after": policy.reference_logprobs(read), "own after": policy.logprobs(read)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "other", "adapters"),
    [("TP2+SP", "PP2", False), ("TP2+SP", "PP2", True), ("PP2", "TP2xCP2+SP", True)],
)
def test_a_policy_that_is_resumed_keeps_the_reference_that_is_named(
    ranks, checkpoint, tmp_path, name: str, other: str, adapters: bool
) -> None:
    """Without adapters the weights of `model_name` are not even needed."""
    path, reference = two_models(checkpoint, FAMILIES[True])
    data, here, there = batches(), LAYOUTS[name], LAYOUTS[other]
    model = Path(shutil.copytree(path, tmp_path / "model"))

    def config(megatron: dict[str, Any]) -> dict[str, Any]:
        made = adapted(model, megatron, None) if adapters else policy_config(model, megatron)
        return made | {"reference_model_name": str(reference)}

    before = ranks.run(here.world, train, config(here.megatron), data, tmp_path)[0]
    if not adapters:
        (model / "model.safetensors").unlink()
    exact = exact_of(reference, data)
    for seen in ranks.run(there.world, resume, config(there.megatron), data, tmp_path):
        assert_read(seen["after"], exact, data, "reference logprobs")
        torch.testing.assert_close(seen["own after"], before["own after"], rtol=1e-5, atol=1e-5)


def bits(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with open_policy(config) as policy:
        with policy.reference():
            pass
        return weights_of(policy)


@pytest.mark.parametrize("peft", [False, True])
def test_weights_have_the_same_bits_beside_a_reference_that_is_named(
    ranks, checkpoint, peft: bool
) -> None:
    path, other = two_models(checkpoint, FAMILIES[False])
    config = adapted(path, {}, None) if peft else policy_config(path, {})
    config["precision"] = "bfloat16"
    (alone,) = ranks.run(1, bits, config)
    (beside,) = ranks.run(1, bits, config | {"reference_model_name": str(other)})
    assert same(alone, beside)


def values_of(config: dict[str, Any], data: BatchedDataDict) -> torch.Tensor:
    with open_policy(config) as policy, policy.reference():
        return policy.values(data)


def said(config: dict[str, Any], with_reference: bool = True) -> str:
    opened = open_policy(config, init_reference_model=with_reference)
    with pytest.raises(ConfigError) as error, opened:
        pass
    return str(error.value)


def test_a_reference_that_does_not_fit_is_refused_with_what_to_do(
    ranks, checkpoint, tmp_path
) -> None:
    sizes = SIZES | {"tied": False}
    path, other = two_models(checkpoint, FAMILIES[False])
    adapters = peft_models.make_adapters(path, tmp_path / "adapters", ALL)
    of_other = peft_models.make_adapters(path, tmp_path / "some", ["q_proj"])

    def refusal(name: Path, config: dict[str, Any] | None = None, **more: Any) -> str:
        own = policy_config(path, {}) if config is None else config
        (found,) = ranks.run(1, partial(said, **more), own | {"reference_model_name": str(name)})
        assert "policy.reference_model_name" in found
        return str(found)

    assert "init_reference_model=False: leave the key out" in refusal(other, with_reference=False)
    assert "num_layers is 2, not 4" in refusal(checkpoint("qwen3", **sizes | {"layers": 2}))
    assert "a qwen2 model and policy.model_name a qwen3" in refusal(checkpoint("qwen2", **sizes))
    assert "override it with policy.hf_config_overrides" in refusal(
        checkpoint("qwen3", **sizes | {"vocab": 131})
    )
    assert "is not a directory" in refusal(tmp_path / "nothing")
    assert "enable policy.megatron_cfg.peft, or merge them" in refusal(adapters)
    lora = adapted(path, {}, None, target_modules=ALL)
    assert "have 4: set it to that. Or merge them" in refusal(adapters, altered(lora, dim=2))
    assert "set target_modules to the modules that it adapts" in refusal(of_other, lora)
    damaged = Path(shutil.copytree(other, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in refusal(damaged)
    head = {"enabled": True, "reward_model_type": "regression"}
    assert "has no score.weight, score.bias: give a checkpoint with the head" in refusal(
        other, policy_config(path, {}, reward_model_cfg=head)
    )


def test_the_reference_of_a_value_model_is_a_value_model(ranks, checkpoint, tmp_path) -> None:
    path, other = two_models(checkpoint, FAMILIES[False])
    model = scalar_oracle.make("regression", other, tmp_path / "values")
    head = {"enabled": True, "reward_model_type": "regression"}
    config = policy_config(path, {}, reward_model_cfg=head, reference_model_name=str(model))
    data = batches(1)
    with torch.no_grad():
        rounded = scalar_oracle.values(scalar_oracle.load("regression", model), data)
        with InDouble():
            double = scalar_oracle.load("regression", model, torch.float64)
            exact = Exact.between(rounded, scalar_oracle.values(double, data))
    (seen,) = ranks.run(1, values_of, config, data)
    assert_equal("values of the reference", seen, exact)


def exchanges(config: dict[str, Any], data: BatchedDataDict) -> tuple[list[int], int, int]:
    """Bytes of each exchange of weights in one call as the reference and then two within its
    context; those of the parameters on this rank, and those of the host's copy.
    """
    moved: list[int] = []
    original = host_copies.swap

    def counted(pairs: Any) -> None:
        moved.append(sum(tensor.nbytes for tensor, _ in pairs))
        original(pairs)

    host_copies.swap = counted
    try:
        with open_policy(config) as policy:
            policy.reference_logprobs(data)
            with policy.reference():
                policy.logprobs(data)
                policy.entropy(data)
            held = {id(each): each.nbytes for _, each in policy._engine.held}
            copies = [o for o in gc.get_objects() if isinstance(o, host_copies.HostCopies)]
            return moved, sum(held.values()), sum(each.nbytes for each in copies)
    finally:
        host_copies.swap = original


@pytest.mark.parametrize("name", ["TP2+SP", "PP2"])
def test_a_reference_costs_a_copy_on_the_host_and_an_exchange_on_each_way(
    ranks, checkpoints, name: str
) -> None:
    case = LAYOUTS[name]
    config = policy_config(checkpoints[False], case.megatron)
    for moved, held, copy in ranks.run(case.world, exchanges, config, read_of(batches(1))):
        assert moved == [held] * 4 and copy == held


DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
PLACES = {
    "DP2": LAYOUTS["DP2"].megatron,
    "DP2, overlapped": LAYOUTS["DP2"].megatron | OVERLAPPED,
    "FSDP2 x 2": FSDP2_LAYOUTS["FSDP2 x 2"].megatron,
}


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def interrupt_the_sixth(call: Any) -> Any:
    calls = iter(range(1000))

    def interrupted(*arguments: Any) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        call(*arguments)

    return interrupted


def interrupted(config: dict[str, Any]) -> dict[str, bool]:
    with open_policy(config) as policy:
        start = weights(policy)
        policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
        trained = weights(policy)
        with pytest.raises(KeyError, match="stop here"), policy.reference():
            inside = weights(policy)
            raise KeyError("stop here")
        after = weights(policy)
        half = replaced(exchange, "_to_pieces", interrupt_the_sixth)
        with half, pytest.raises(KeyboardInterrupt), policy.reference():
            raise AssertionError("the exchange was to be interrupted")
        undone = weights(policy)
        nested = pytest.raises(
            ConfigError, match="has to wait until the reference policy has ended"
        )
        with policy.reference(), nested, policy.reference():
            pass
        return {
            "reference inside": same(inside, start),
            "own weights after": same(after, trained),
            "own weights after half of an exchange": same(undone, trained),
            "trained at all": not same(start, trained),
            "own weights after nesting": same(weights(policy), trained),
        }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["DP2", "DP2, overlapped", "FSDP2 x 2"])
def test_the_policys_weights_come_back_bit_equal_from_an_interrupted_reference(
    ranks, checkpoints, precision: str, name: str
) -> None:
    config = policy_config(checkpoints[True], PLACES[name], precision=precision)
    for seen in ranks.run(2, interrupted, config):
        assert all(seen.values()), seen


def train_around_reference(config: dict[str, Any], read_reference: bool) -> list[float]:
    with open_policy(config) as policy:
        losses = []
        for _ in range(3):
            if read_reference:
                policy.reference_logprobs(own_share(policy, DATA))
            result = policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
            losses.append(result["loss"].item())
        return losses


@pytest.mark.parametrize("name", ["DP2, overlapped", "FSDP2 x 2"])
def test_reading_the_reference_between_steps_changes_no_step(ranks, checkpoints, name) -> None:
    config = policy_config(checkpoints[True], PLACES[name])
    quiet = ranks.run(2, train_around_reference, config, False)
    assert ranks.run(2, train_around_reference, config, True) == quiet


def ask_for_too_much(config: dict[str, Any]) -> None:
    loss = LOSSES["token"]()
    with open_policy(config, **UNUSED) as policy:
        for attempt, reason in (
            (lambda: policy.train(DATA, loss), "init_optimizer=False"),
            (lambda: policy.reference_logprobs(DATA), "init_reference_model=False"),
            (lambda: policy.generate(DATA), "policy.generation"),
            (lambda: policy.topk_logits(DATA, VOCAB + 1), "vocabulary"),
            (lambda: policy.train(DATA, loss, eval_mode=True, gbs=3), "multiple"),
        ):
            with pytest.raises((RuntimeError, ValueError), match=reason):
                attempt()
        policy.train(DATA, loss, eval_mode=True)


@pytest.mark.parametrize("megatron", [{}, {"dtensor_cfg": {}}], ids=["Megatron-Core", "FSDP2"])
def test_what_a_policy_cannot_do_it_refuses_with_the_reason(ranks, checkpoints, megatron) -> None:
    ranks.run(1, ask_for_too_much, policy_config(checkpoints[True], megatron))
