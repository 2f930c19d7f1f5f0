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
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.memory import pinned_pool
from megatron_policy.memory.states import IDLE, LOGPROB, TRAIN
from megatron_policy.policy import MegatronPolicy
from tests import oracle, peft_models, scalar_oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, own_steps, policy_config
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
from tests.dist.shortcuts import UNUSED, answer, packed, refusal
from tests.dist.test_adapter_handover import altered
from tests.dist.test_adapters import ALL, adapted
from tests.dist.test_export import tensors_of
from tests.dist.test_scalar_heads import expected_of
from tests.exact import Exact, InDouble, assert_equal, load_hf

PACKED = packed(48)
DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
STEPS = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
READ = BatchedDataDict({name: STEPS[name] for name in ("input_ids", "input_lengths")})
VALUES = {"enabled": True, "reward_model_type": "regression"}
answer_whole = partial(answer, init_optimizer=True, init_reference_model=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def train(config: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """What the reference and the policy compute around two steps; with `root` a checkpoint of them
    is saved there.
    """
    with open_policy(config) as policy:
        seen = {
            "start": {name: tensor.clone() for name, tensor in policy.export()},
            "adapters": {},
            "before": policy.reference_logprobs(READ),
            "own before": policy.logprobs(READ),
        }
        if config["megatron_cfg"].get("peft"):
            seen["adapters"] = {n: t.clone() for n, t in policy.export(adapters=True)}
        for batch in own_steps(policy, STEPS):
            policy.train(batch, LOSSES["token"](), mbs=1)
        policy.memory.enter(IDLE)
        policy.memory.enter(LOGPROB)
        trained = weights_of(policy)
        seen["after"] = policy.reference_logprobs(READ)
        seen["unchanged"] = same(weights_of(policy), trained)
        seen["own after"] = policy.logprobs(READ)
        if root is not None:
            policy.memory.enter(TRAIN)
            policy.save_checkpoint(**paths(root))
        return seen


def exact_of(path: Path, load: Any = load_hf) -> Exact:
    """What transformers makes of the rows with that checkpoint; `load` loads it."""
    read = partial(oracle.hf_logprobs, tokens=READ["input_ids"])
    with torch.no_grad():
        rounded, double = read(load(path)), load(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, read(double))


def assert_read(found: torch.Tensor, exact: Exact, what: str) -> None:
    """Equal where rows have tokens: packing leaves the rest out."""
    inside = torch.arange(1, LENGTH) < READ["input_lengths"].unsqueeze(1)
    there = Exact(torch.where(inside, exact.value, 0.0), exact.rounding)
    assert_equal(what, torch.where(inside, found[:, 1:], 0.0), there)


def assert_around(seen: dict[str, Any], reference: Exact, own: Exact) -> None:
    assert_read(seen["before"], reference, "reference logprobs")
    assert torch.equal(seen["before"], seen["after"])
    assert_read(seen["own before"], own, "logprobs at the start")
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
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    config = policy_config(path, case.megatron, reference_model_name=str(other), **top)
    before = tensors_of(path)
    for seen in ranks.run(case.world, train, config):
        assert_around(seen, exact_of(other), exact_of(path))
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
    case, load = LAYOUTS[name], peft_models.Loads
    expected = exact_of(other) if merged else exact_of(path, load(first))
    config = adapted(path, case.megatron, start, target_modules=ALL) | top
    config["reference_model_name"] = str(other if merged else first)
    adapters = peft_models.load_file(start / "adapter_model.safetensors")
    for seen in ranks.run(case.world, train, config):
        assert_around(seen, expected, exact_of(path, load(start)))
        assert same(seen["adapters"], adapters)


def resume(config: dict[str, Any], root: Path) -> dict[str, Any]:
    with resumed(config, root) as policy:
        return {"after": policy.reference_logprobs(READ), "own after": policy.logprobs(READ)}


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
    here, there = LAYOUTS[name], LAYOUTS[other]
    model = Path(shutil.copytree(path, tmp_path / "model"))

    def config(megatron: dict[str, Any]) -> dict[str, Any]:
        made = adapted(model, megatron, None) if adapters else policy_config(model, megatron)
        return made | {"reference_model_name": str(reference)}

    before = ranks.run(here.world, train, config(here.megatron), tmp_path)[0]
    if not adapters:
        (model / "model.safetensors").unlink()
    exact = exact_of(reference)
    for seen in ranks.run(there.world, resume, config(there.megatron), tmp_path):
        assert_read(seen["after"], exact, "reference logprobs")
        torch.testing.assert_close(seen["own after"], before["own after"], rtol=1e-5, atol=1e-5)


def bits(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
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
    beside = config | {"reference_model_name": str(other)}
    assert same(*(ranks.run(1, answer_whole, each, bits)[0] for each in (config, beside)))


def test_a_reference_that_does_not_fit_is_refused_with_what_to_do(
    ranks, checkpoint, tmp_path
) -> None:
    sizes = SIZES | {"tied": False}
    path, other = two_models(checkpoint, FAMILIES[False])
    adapters = peft_models.make_adapters(path, tmp_path / "adapters", ALL)
    of_other = peft_models.make_adapters(path, tmp_path / "some", ["q_proj"])

    damaged = Path(shutil.copytree(other, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"")
    fewer, smaller = (checkpoint("qwen3", **sizes | m) for m in ({"layers": 2}, {"vocab": 131}))
    plain, lora = policy_config(path, {}), adapted(path, {}, None, target_modules=ALL)
    head = policy_config(path, {}, reward_model_cfg=VALUES)
    for reference, config, message in (
        (fewer, plain, "num_layers is 2, not 4"),
        (checkpoint("qwen2", **sizes), plain, "a qwen2 model and policy.model_name a qwen3"),
        (smaller, plain, "override it with policy.hf_config_overrides"),
        (tmp_path / "nothing", plain, "is not a directory"),
        (adapters, plain, "enable policy.megatron_cfg.peft, or merge them"),
        (adapters, altered(lora, dim=2), "have 4: set it to that. Or merge them"),
        (of_other, lora, "set target_modules to the modules that it adapts"),
        (damaged, plain, "model.safetensors"),
        (other, head, "has no score.weight, score.bias: give a checkpoint with the head"),
    ):
        config = config | {"reference_model_name": str(reference)}
        (said,) = ranks.run(1, refusal, config, ConfigError)
        assert "policy.reference_model_name" in said and message in said
    refuse = partial(refusal, init_reference_model=False)
    (said,) = ranks.run(1, refuse, plain | {"reference_model_name": str(other)}, ConfigError)
    assert "policy.reference_model_name" in said
    assert "init_reference_model=False: leave the key out" in said


def values_of_the_reference(policy: MegatronPolicy) -> torch.Tensor:
    with policy.reference():
        return policy.values(DATA)


def test_the_reference_of_a_value_model_is_a_value_model(ranks, checkpoint, tmp_path) -> None:
    path, other = two_models(checkpoint, FAMILIES[False])
    model = scalar_oracle.make("regression", other, tmp_path / "values")
    config = policy_config(path, {}, reward_model_cfg=VALUES, reference_model_name=str(model))
    (seen,) = ranks.run(1, answer_whole, config, values_of_the_reference)
    exact = expected_of(model, "regression", DATA, scalar_oracle.values)
    assert_equal("values of the reference", seen, exact)


def exchanges(config: dict[str, Any]) -> tuple[list[int], int, int]:
    """Bytes of each exchange of weights in one call as the reference and then two within its
    context; those of the parameters on this rank, and those of the host's copy.
    """
    moved: list[int] = []

    def counting(swap: Any) -> Any:
        def counted(pairs: Any) -> None:
            moved.append(sum(tensor.nbytes for tensor, _ in pairs))
            swap(pairs)

        return counted

    with replaced(pinned_pool, "swap", counting), open_policy(config) as policy:
        policy.reference_logprobs(READ)
        with policy.reference():
            policy.logprobs(READ)
            policy.entropy(READ)
        held = {id(each): each.nbytes for _, each in policy._engine.held}
        copies = [o for o in gc.get_objects() if isinstance(o, pinned_pool.HostCopies)]
        return moved, sum(held.values()), sum(each.nbytes for each in copies)


@pytest.mark.parametrize("name", ["TP2+SP", "PP2"])
def test_a_reference_costs_a_copy_on_the_host_and_an_exchange_on_each_way(
    ranks, checkpoints, name: str
) -> None:
    config = policy_config(checkpoints[False], LAYOUTS[name].megatron)
    for moved, held, copy in ranks.run(2, exchanges, config):
        assert moved == [held] * 4 and copy == held


PLACES = {
    "DP2": LAYOUTS["DP2"].megatron,
    "DP2, overlapped": LAYOUTS["DP2"].megatron | OVERLAPPED,
    "FSDP2 x 2": FSDP2_LAYOUTS["FSDP2 x 2"].megatron,
}


def interrupt_the_sixth(call: Any) -> Any:
    calls = iter(range(1000))

    def interrupted(*arguments: Any, **options: Any) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        call(*arguments, **options)

    return interrupted


def interrupt_the_reference(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        start = weights_of(policy)
        policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
        trained = weights_of(policy)
        assert not same(start, trained)
        with pytest.raises(KeyError, match="stop here"), policy.reference():
            assert same(weights_of(policy), start)
            raise KeyError("stop here")
        assert same(weights_of(policy), trained)
        half = replaced(exchange, "_copy", interrupt_the_sixth)
        with half, pytest.raises(KeyboardInterrupt), policy.reference():
            raise AssertionError("the exchange was to be interrupted")
        assert same(weights_of(policy), trained)
        message = "has to wait until the reference policy has ended"
        nested = pytest.raises(ConfigError, match=message)
        with policy.reference(), nested, policy.reference():
            pass
        assert same(weights_of(policy), trained)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["DP2", "DP2, overlapped", "FSDP2 x 2"])
def test_the_policys_weights_come_back_bit_equal_from_an_interrupted_reference(
    ranks, checkpoints, precision: str, name: str
) -> None:
    config = policy_config(checkpoints[True], PLACES[name], precision=precision)
    ranks.run(2, interrupt_the_reference, config)


def train_around_reference(read_reference: bool, policy: MegatronPolicy) -> list[float]:
    losses, share = [], own_share(policy, DATA)
    for _ in range(3):
        if read_reference:
            policy.reference_logprobs(share)
        losses.append(policy.train(share, LOSSES["token"](), mbs=1)["loss"].item())
    return losses


@pytest.mark.parametrize("name", ["DP2, overlapped", "FSDP2 x 2"])
def test_reading_the_reference_between_steps_changes_no_step(ranks, checkpoints, name) -> None:
    config = policy_config(checkpoints[True], PLACES[name])
    ways = (partial(train_around_reference, reading) for reading in (False, True))
    quiet, reading = (ranks.run(2, answer_whole, config, way) for way in ways)
    assert reading == quiet


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
            with pytest.raises((ConfigError, BatchError), match=reason):
                attempt()
        policy.train(DATA, loss, eval_mode=True)


@pytest.mark.parametrize("megatron", [{}, {"dtensor_cfg": {}}], ids=["Megatron-Core", "FSDP2"])
def test_what_a_policy_cannot_do_it_refuses_with_the_reason(ranks, checkpoints, megatron) -> None:
    ranks.run(1, ask_for_too_much, policy_config(checkpoints[True], megatron))
