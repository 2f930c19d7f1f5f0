"""Adapters outside training: merged or alone in other hands, in checkpoints; what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.converters.formats.peft_files import ADAPTER_MODEL
from megatron_policy.engines.megatron.adapters import LowRank
from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.errors import CheckpointError, ConfigError
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    SP,
    VOCAB,
    layout,
)
from tests.dist.resuming import paths, replaced, resumed
from tests.dist.test_adapters import ALL, adapted
from tests.dist.test_refit_faults import KeepingTransport
from tests.exact import Exact, InDouble, assert_equal, load_hf

ANEW: dict[str, Any] = {"lora_B_init_method": "normal"}
"""With B of zeros adapters would change nothing."""
WHERE = ["one process", "TP2+SP", "PP2xVPP2", "TP4 over 2 groups", "TP2xPP2xDP2+SP"]


def batches(steps: int) -> BatchedDataDict:
    return oracle.make_batch(steps * GLOBAL_BATCH, LENGTH, VOCAB)


def hand_over(config: dict[str, Any], data: BatchedDataDict, root: Path) -> dict[str, Any]:
    """Train, then hand the weights over in every way."""
    with open_policy(config) as policy:
        fresh = {n: t.clone() for n, t in policy.export(adapters=True)}
        for batch in own_steps(policy, data):
            policy.train(batch, LOSSES["token"](), mbs=1)
        policy.export_peft(root / "peft")
        policy.export_hf(root / "merged")
        transport = KeepingTransport()
        sent = policy.refit(transport, adapters=True).tensors
        sizes = {n: t.nbytes for n, t in policy.export(adapters=True)}
        return {
            "fresh": fresh,
            "logprobs": policy.logprobs(BatchedDataDict({"input_ids": data["input_ids"]})),
            "base": {n: p.detach().clone() for n, p in policy.named_parameters()},
            "sent": {n: each.nbytes for n, each in sent.items()},
            "moved": policy.exporter.plan(adapters=True).total_bytes,
            "sizes": sizes,
        }


def base_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("name", WHERE)
def test_peft_and_transformers_compute_what_the_policy_does(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(2)
    config = adapted(path, LAYOUTS[name].megatron, None, target_modules=ALL, **ANEW)
    (alone,) = ranks.run(1, fresh_adapters, adapted(path, {}, None, target_modules=ALL, **ANEW))
    world = LAYOUTS[name].world
    before = ranks.run(world, base_of, policy_config(path, LAYOUTS[name].megatron))
    seen = ranks.run(world, hand_over, config, data, tmp_path)
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    with_adapters = peft_models.Loads(tmp_path / "peft")
    rounded, double = read(with_adapters(path)), with_adapters(path, torch.float64)
    with InDouble():
        exact = Exact.between(rounded.detach(), read(double).detach())
    merged = Exact.of(tmp_path / "merged", read)
    for own, base in zip(seen, before, strict=True):
        assert_equal("logprobs of peft", own["logprobs"][:, 1:], exact)
        assert_equal("logprobs of the merged export", own["logprobs"][:, 1:], merged)
        assert {name for name in own["base"] if ".adapter." not in name} == base.keys()
        for weight, tensor in base.items():
            assert torch.equal(own["base"][weight], tensor), weight
        for weight, tensor in own["fresh"].items():
            assert torch.equal(tensor, alone[weight]), weight
        assert own["fresh"].keys() == alone.keys()
        total = sum(own["sizes"].values())
        assert own["sizes"] == own["sent"] or not own["sent"]
        assert own["moved"] == total


def fresh_adapters(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with open_policy(config, init_optimizer=False) as policy:
        return {n: t.clone() for n, t in policy.export(adapters=True)}


def a_hundred_steps(config: dict[str, Any], data: BatchedDataDict) -> list[str]:
    """Weights of the base that a hundred steps, each with a merged export, have changed."""
    with open_policy(config) as policy:
        base = policy._engine.held
        before = [parameter.detach().clone() for _, parameter in base]
        first = {name: tensor.clone() for name, tensor in policy.export()}  # B is zero
        merged = first
        for number in range(100):
            batch = own_steps(policy, data)[number % 2]
            policy.train(batch, LOSSES["token"](), mbs=4)
            merged = {name: tensor.clone() for name, tensor in policy.export()}
        changed = {name for name, tensor in merged.items() if not torch.equal(tensor, first[name])}
        assert changed == {name for name in first if name.endswith("_proj.weight")}
        pairs = zip(base, before, strict=True)
        return [entry.megatron for (entry, now), was in pairs if not torch.equal(now, was)]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_of_the_base_outlast_a_hundred_steps_and_merged_exports(
    ranks, checkpoint, world: int
) -> None:
    """On two ranks, tensor-parallel, with the distributed optimizer."""
    path = checkpoint("qwen2", tied=False, **SIZES)
    of = layout(2, tp=2, **SP, **OVERLAPPED) if world == 2 else LAYOUTS["one process"]
    config = adapted(path, of.megatron, None)
    assert ranks.run(world, a_hundred_steps, config, batches(2)) == [[]] * world


def changed_by_a_step(config: dict[str, Any], data: BatchedDataDict) -> list[str]:
    with open_policy(config) as policy:
        before = [parameter.detach().clone() for _, parameter in policy._engine.held]
        policy.train(own_steps(policy, data)[0], LOSSES["token"](), mbs=4)
        pairs = zip(policy._engine.held, before, strict=True)
        return [entry.megatron for (entry, now), was in pairs if not torch.equal(now, was)]


def test_correction_biases_of_the_base_stay(ranks, checkpoint) -> None:
    path, rate = (
        checkpoint("deepseek_v3", tied=False, **SIZES),
        {"moe_router_bias_update_rate": 0.5},
    )
    plain = policy_config(path, rate)
    moved = ranks.run(1, changed_by_a_step, plain, batches(1))[0]
    assert any(name.endswith("expert_bias") for name in moved)
    assert ranks.run(1, changed_by_a_step, adapted(path, rate, None), batches(1)) == [[]]


def export_and_read(config: dict[str, Any], tokens: torch.Tensor, path: Path) -> torch.Tensor:
    with open_policy(config, init_optimizer=False) as policy:
        policy.export_peft(path)
        return policy.logprobs(BatchedDataDict({"input_ids": tokens}))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("olmoe", "EP2xTP2+SP"),
        ("olmoe", "EP2xETP2+TP2"),
        ("gpt_oss", "EP2xPP2"),
        ("gpt_oss", "EP2xTP2+SP"),
    ],
)
def test_peft_computes_what_the_policy_does_with_adapters_of_experts(
    ranks, checkpoint, tmp_path: Path, family: str, name: str
) -> None:
    """PEFT itself stacks the adapters of single experts, as transformers stacks the experts."""
    path, tokens = checkpoint(family, tied=False, **SIZES), batches(1)["input_ids"]
    case, target = EXPERT_LAYOUTS[name], tmp_path / "peft"
    config = adapted(path, case.megatron, None, **ANEW)
    seen = ranks.run(case.world, export_and_read, config, tokens, target)
    load = peft_models.Loads(target)
    rounded, double = oracle.hf_logprobs(load(path), tokens), load(path, torch.float64)
    with InDouble():
        exact = Exact.between(rounded.detach(), oracle.hf_logprobs(double, tokens).detach())
    for logprobs in seen:
        assert_equal("logprobs of peft", logprobs[:, 1:], exact)


def test_a_fused_layers_shared_a_is_handed_over_for_each_module(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(1)
    ranks.run(2, hand_over, adapted(path, LAYOUTS["TP2+SP"].megatron, None, **ANEW), data, tmp_path)
    found = peft_models.load_file(tmp_path / "peft" / ADAPTER_MODEL)
    layer = "base_model.model.model.layers.1.self_attn"
    same = [found[f"{layer}.{each}_proj.lora_A.weight"] for each in "qkv"]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    # PEFT's own reader takes it, and so does a policy that goes on with it.
    assert isinstance(PeftModel.from_pretrained(load_hf(path), str(tmp_path / "peft")), PeftModel)
    (again,) = ranks.run(1, fresh_adapters, adapted(path, {}, tmp_path / "peft"))
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def save_after_two(config: dict[str, Any], data: BatchedDataDict, root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        for batch in own_steps(policy, data)[:2]:
            policy.train(batch, LOSSES["token"](), mbs=1)
        policy.save_checkpoint(**paths(root))


def third_step(config: dict[str, Any], data: BatchedDataDict, root: Path) -> dict[str, Any]:
    with resumed(config, root, init_reference_model=False) as policy:
        return last_of(policy, own_steps(policy, data)[2:])


def three_steps(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    with open_policy(config, init_reference_model=False) as policy:
        return last_of(policy, own_steps(policy, data))


def last_of(policy: Any, steps: list[BatchedDataDict]) -> dict[str, Any]:
    for batch in steps:
        result = policy.train(batch, LOSSES["token"](), mbs=1)
    adapters = {n: t.clone() for n, t in policy.export(adapters=True)}
    return {"loss": result["loss"], "adapters": adapters}


RESUMED = [
    ("TP2+SP", "PP2 uneven", "qwen2"),
    ("one process", "TP2", "qwen2"),
    ("PP2xVPP2", "one process", "qwen2"),
    ("EP2", "one process", "qwen3_moe"),
    ("EP2xTP2+SP", "EP2xPP2", "qwen3_moe"),
    ("TP2+SP, experts whole", "EP2xETP2+TP2", "qwen3_moe"),
    ("EP2xTP2+SP", "PP2", "gpt_oss"),
    ("EP4", "EP2xTP2+SP", "gpt_oss"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "other", "family"), RESUMED)
def test_a_checkpoint_of_adapters_goes_on_in_any_layout(
    ranks, checkpoint, tmp_path: Path, name: str, other: str, family: str
) -> None:
    path, data = checkpoint(family, tied=False, **SIZES), batches(3)
    cases, modules = LAYOUTS | EXPERT_LAYOUTS, [] if family == "gpt_oss" else ALL
    here, there = (
        adapted(path, cases[n].megatron, None, target_modules=modules, **ANEW)
        for n in (name, other)
    )
    uninterrupted = ranks.run(cases[name].world, three_steps, here, data)[0]
    ranks.run(cases[name].world, save_after_two, here, data, tmp_path)
    for folder in paths(tmp_path).values():
        keys = manifest.read(tracker.find(folder)).tensors.keys()
        assert keys and all(".adapter." in key for key in keys)
    for seen in ranks.run(cases[other].world, third_step, there, data, tmp_path):
        torch.testing.assert_close(seen["loss"], uninterrupted["loss"], rtol=1e-5, atol=1e-6)
        for weight, tensor in uninterrupted["adapters"].items():
            torch.testing.assert_close(seen["adapters"][weight], tensor, rtol=1e-4, atol=1e-5)


def refusals(
    config: dict[str, Any], plain: dict[str, Any], other: dict[str, Any], root: Path
) -> dict[str, str]:
    """What a policy says of checkpoints and adapters that are not its own."""
    said = {}
    with open_policy(config) as policy:
        policy.save_checkpoint(root / "adapters")
        policy.export_peft(root / "peft")
    with open_policy(plain) as policy:
        policy.save_checkpoint(root / "model")
        with pytest.raises(ConfigError) as error:
            policy.export_peft(root / "none")
        said["none"] = str(error.value)
        said["adapters in a whole policy"] = refused(policy, root / "adapters")
    with open_policy(config) as policy:
        said["a whole model"] = refused(policy, root / "model")
    with open_policy(other) as policy:
        said["another base"] = refused(policy, root / "adapters")
    parts = {"target_modules": ["q_proj", "k_proj"]}
    with open_policy(altered(config, **parts)) as policy:
        policy.save_checkpoint(root / "parts")
    for name, peft in {
        "another scale": {"alpha": 1.0, **parts},
        "other modules": {"target_modules": ["q_proj", "v_proj"]},
        "another rank": {"dim": 2, **parts},
    }.items():
        with open_policy(altered(config, **peft)) as policy:
            said[name] = refused(policy, root / "parts")
    return said


def altered(config: dict[str, Any], **peft: Any) -> dict[str, Any]:
    megatron = config["megatron_cfg"]
    return {**config, "megatron_cfg": {**megatron, "peft": {**megatron["peft"], **peft}}}


def refused(policy: Any, path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        policy.load_checkpoint(path, fresh_optimizer=True)
    return str(error.value)


@pytest.mark.nightly
def test_checkpoints_of_another_kind_or_base_are_refused(ranks, checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    other = checkpoint("qwen2", tied=False, seed=3, **SIZES)
    configs = adapted(path, {}, None), policy_config(path, {}), adapted(other, {}, None)
    (said,) = ranks.run(1, refusals, *configs, tmp_path)
    assert "no adapters to hand over: set policy.megatron_cfg.peft" in said["none"]
    assert "has adapters alone" in said["adapters in a whole policy"]
    assert "has a whole model, but this policy trains adapters" in said["a whole model"]
    assert "has adapters of other weights" in said["another base"]
    assert "another scale: set policy.megatron_cfg.peft.alpha" in said["another scale"]
    assert "another rank: set policy.megatron_cfg.peft.dim" in said["another rank"]
    assert "other modules: set policy.megatron_cfg.peft.target_modules" in said["other modules"]
    with pytest.raises(AssertionError, match=r"trained on .* which has other weights or config"):
        ranks.run(1, fresh_adapters, adapted(other, {}, tmp_path / "peft"))
    apart = peft_models.make_adapters(path, tmp_path / "apart", ALL)
    with pytest.raises(AssertionError, match="name the modules in target_modules instead"):
        ranks.run(1, fresh_adapters, adapted(path, {}, apart))
    with pytest.raises(AssertionError, match="have 4: set it to that"):
        ranks.run(1, fresh_adapters, adapted(path, {}, tmp_path / "peft", dim=8))
    with pytest.raises(AssertionError, match="set target_modules to the modules that it adapts"):
        one = adapted(path, {}, tmp_path / "peft", target_modules=["q_proj"])
        ranks.run(1, fresh_adapters, one)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_adapters_that_are_not_finite_are_refused_by_name(
    ranks, checkpoint, tmp_path: Path, value: float
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    made = peft_models.make_adapters(path, tmp_path / "peft", ALL)
    tensors = load_file(made / ADAPTER_MODEL)
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    tensors[name][-1, 1] = value
    save_file(tensors, made / ADAPTER_MODEL)
    config = adapted(path, {}, made, target_modules=ALL)
    with pytest.raises(AssertionError, match=rf"ConversionError: {name} in .* are not finite"):
        ranks.run(1, fresh_adapters, config)


def states(config: dict[str, Any], data: BatchedDataDict, loss: Any = None) -> dict[str, int]:
    """Bytes of gradients and of what the optimizer keeps, and elements of the adapters."""
    with open_policy(config, init_reference_model=False) as policy:
        policy.train(own_steps(policy, data)[0], loss or LOSSES["token"](), mbs=1)
        trainable = policy._engine.trainable
        shards = list(optimizer_shards(trainable.optimizer))
        buffers = [
            b for chunk in trainable.chunks for b in chunk.buffers + chunk.expert_parallel_buffers
        ]
        return {
            "gradients": sum(b.grad_data.nbytes for b in buffers),
            "moments": sum(s.state[name].nbytes for s in shards for name in s.moments),
            "adapters": sum(p.numel() for _, p in policy._engine.adapters.held),
        }


@pytest.mark.parametrize("name", ["one process", "TP2+SP", "PP2", "EP2"])
def test_only_adapters_have_gradients_and_moments(ranks, checkpoint, name: str) -> None:
    path = checkpoint("qwen3_moe", tied=False, **SIZES)
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    for seen in ranks.run(case.world, states, adapted(path, case.megatron, None), batches(1)):
        assert seen["gradients"] == 4 * seen["adapters"] > 0
        assert seen["moments"] == 2 * 4 * seen["adapters"]


def with_a_wrong_shard(config: dict[str, Any], data: BatchedDataDict) -> torch.Tensor:
    def scaled(spread: Any) -> Any:
        def call(self: LowRank, b: torch.Tensor) -> torch.Tensor:
            factor = 1.001 if torch.distributed.get_rank() == 1 else 1.0
            return factor * spread(self, b)

        return call

    with replaced(LowRank, "_spread", scaled), open_policy(config) as policy:
        return policy.logprobs(BatchedDataDict({"input_ids": data["input_ids"]}))


def test_one_shard_that_is_scaled_is_found(ranks, checkpoint, tmp_path: Path) -> None:
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(1)
    start = peft_models.make_adapters(path, tmp_path / "start", ALL)
    load = peft_models.Loads(start)
    double = load(path, torch.float64)
    with InDouble():
        right = oracle.hf_logprobs(double, data["input_ids"]).detach()
    exact = Exact.between(oracle.hf_logprobs(load(path), data["input_ids"]).detach(), right)
    config = adapted(path, LAYOUTS["TP2+SP"].megatron, start, target_modules=ALL)
    for seen in ranks.run(2, with_a_wrong_shard, config, data):
        with pytest.raises(AssertionError):
            assert_equal("logprobs", seen[:, 1:], exact)
