"""Adapters through what a run does with them: handed over, merged or alone, saved and refused;
dropout, refits and generation between steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.adapters.peft_files import ADAPTER_MODEL
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.rows.shards import is_split
from megatron_policy.engines.megatron.adapters import LowRank
from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    LENGTH,
    SIZES,
    VOCAB,
)
from tests.dist.resuming import replaced, weights_of
from tests.dist.test_adapters import ALL, FULL, adapted
from tests.dist.test_generate import NEW, PROMPT_LENGTHS, Tokenizer, generation, hf_greedy, prompts
from tests.dist.test_memory_states import memory_of
from tests.dist.test_refit_faults import KeepingTransport
from tests.exact import Exact, assert_equal

ANEW: dict[str, Any] = {"lora_B_init_method": "normal"}
"""With B of zeros adapters would change nothing."""
CASES = [
    pytest.param("qwen2", "one process", ALL, marks=pytest.mark.daily),
    ("qwen2", "TP2+SP", ALL),
    ("qwen2", "TP2+SP", []),
    ("qwen2", "PP2xVPP2", ALL),
    ("qwen2", "TP4 over 2 groups", ALL),
    ("qwen2", "TP2xPP2xDP2+SP", ALL),
    pytest.param("olmoe", "EP2xTP2+SP", [], marks=pytest.mark.daily),
    ("olmoe", "EP2xETP2+TP2", []),
    ("gpt_oss", "EP2xPP2", []),
    ("gpt_oss", "EP2xTP2+SP", []),
]
"""PEFT itself stacks the adapters of single experts, as transformers stacks the experts."""


def batches(steps: int) -> BatchedDataDict:
    return oracle.make_batch(steps * GLOBAL_BATCH, LENGTH, VOCAB)


def hand_over(config: dict[str, Any], data: BatchedDataDict, root: Path) -> dict[str, Any]:
    """Train, then hand the weights over in every way, the merged ones after each step."""
    with open_policy(config) as policy:
        fresh = {n: t.clone() for n, t in policy.export(adapters=True)}
        for batch in own_steps(policy, data):
            policy.train(batch, LOSSES["token"](), mbs=1)
            assert len(list(policy.export()))
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
            "moved": policy.exporter.select(adapters=True).plan().total_bytes,
            "sizes": sizes,
        }


def base_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize(("family", "layout", "modules"), CASES)
def test_peft_and_transformers_compute_what_the_policy_does(
    ranks, checkpoint, tmp_path: Path, family: str, layout: str, modules: list[str]
) -> None:
    path, data = checkpoint(family, tied=False, **SIZES), batches(2)
    case, peft = (LAYOUTS | EXPERT_LAYOUTS)[layout], {"target_modules": modules, **ANEW}
    (alone,) = ranks.run(1, fresh_adapters, adapted(path, {}, None, **peft))
    before = ranks.run(case.world, base_of, policy_config(path, case.megatron))
    config = adapted(path, case.megatron, None, **peft)
    seen = ranks.run(case.world, hand_over, config, data, tmp_path)
    exact = peft_models.logprobs(path, tmp_path / "peft", data["input_ids"])
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    merged = Exact.of(tmp_path / "merged", read)
    for own, base in zip(seen, before, strict=True):
        assert_equal("logprobs of peft", own["logprobs"][:, 1:], exact)
        assert_equal("logprobs of the merged export", own["logprobs"][:, 1:], merged)
        assert {name for name in own["base"] if ".adapter." not in name} == base.keys()
        for weight, tensor in base.items():
            assert torch.equal(own["base"][weight], tensor), weight
        assert own["fresh"].keys() == alone.keys()
        for weight, tensor in own["fresh"].items():
            assert torch.equal(tensor, alone[weight]), weight
        assert own["sent"] in ({}, own["sizes"])
        assert own["moved"] == sum(own["sizes"].values())


def fresh_adapters(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with open_policy(config, init_optimizer=False) as policy:
        return {n: t.clone() for n, t in policy.export(adapters=True)}


def changed_by_a_step(config: dict[str, Any], data: BatchedDataDict) -> list[str]:
    """Of what the base holds."""
    with open_policy(config) as policy:
        before = [parameter.detach().clone() for _, parameter in policy._engine.held]
        policy.train(own_steps(policy, data)[0], LOSSES["token"](), mbs=4)
        pairs = zip(policy._engine.held, before, strict=True)
        return [entry.megatron for (entry, now), was in pairs if not torch.equal(now, was)]


def test_correction_biases_of_the_base_stay(ranks, checkpoint) -> None:
    path = checkpoint("deepseek_v3", tied=False, **SIZES)
    rate = {"moe_router_bias_update_rate": 0.5}
    (moved,) = ranks.run(1, changed_by_a_step, policy_config(path, rate), batches(1))
    assert any(name.endswith("expert_bias") for name in moved)
    assert ranks.run(1, changed_by_a_step, adapted(path, rate, None), batches(1)) == [[]]


def refusals(
    config: dict[str, Any], plain: dict[str, Any], other: dict[str, Any], root: Path
) -> list[str]:
    """What a policy says of checkpoints and adapters that are not its own."""
    with open_policy(config) as policy:
        policy.save_checkpoint(root / "adapters")
        policy.export_peft(root / "peft")
    with open_policy(plain) as policy:
        policy.save_checkpoint(root / "model")
        with pytest.raises(ConfigError) as error:
            policy.export_peft(root / "none")
    parts = {"target_modules": ["q_proj", "k_proj"]}
    with open_policy(altered(config, **parts)) as policy:
        policy.save_checkpoint(root / "parts")
    return [str(error.value)] + [
        refused(each, root / place)
        for each, place in (
            (plain, "adapters"),
            (config, "model"),
            (other, "adapters"),
            (altered(config, alpha=1.0, **parts), "parts"),
            (altered(config, dim=2, **parts), "parts"),
            (altered(config, target_modules=["q_proj", "v_proj"]), "parts"),
        )
    ]


def altered(config: dict[str, Any], **peft: Any) -> dict[str, Any]:
    megatron = config["megatron_cfg"]
    return {**config, "megatron_cfg": {**megatron, "peft": {**megatron["peft"], **peft}}}


def refused(config: dict[str, Any], path: Path) -> str:
    with open_policy(config) as policy, pytest.raises(CheckpointError) as error:
        policy.load_checkpoint(path, fresh_optimizer=True)
    return str(error.value)


@pytest.mark.nightly
def test_checkpoints_of_another_kind_or_base_are_refused(ranks, checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    other = checkpoint("qwen2", tied=False, seed=3, **SIZES)
    configs = adapted(path, {}, None), policy_config(path, {}), adapted(other, {}, None)
    (heard,) = ranks.run(1, refusals, *configs, tmp_path)
    expected = (
        "no adapters to hand over: set policy.megatron_cfg.peft",
        "has adapters alone",
        "has a whole model, but this policy trains adapters",
        "has adapters of other weights",
        "another scale: set policy.megatron_cfg.peft.alpha",
        "another rank: set policy.megatron_cfg.peft.dim",
        "other modules: set policy.megatron_cfg.peft.target_modules",
    )
    for words, said in zip(expected, heard, strict=True):
        assert words in said
    with pytest.raises(AssertionError, match=r"trained on .* which has other weights or config"):
        ranks.run(1, fresh_adapters, adapted(other, {}, tmp_path / "peft"))
    apart = peft_models.make_adapters(path, tmp_path / "apart", ALL)
    ranks.run(1, fresh_adapters, adapted(path, {}, apart, target_modules=ALL))
    with pytest.raises(AssertionError, match=r"were trained on .*base_model_name_or_path of adapt"):
        ranks.run(1, fresh_adapters, adapted(other, {}, apart, target_modules=ALL))
    overrides = {"hf_config_overrides": {"rms_norm_eps": 0.01}}
    with pytest.raises(AssertionError, match=r"trained with hf_config_overrides {}, not"):
        ranks.run(1, fresh_adapters, adapted(path, {}, tmp_path / "peft") | overrides)
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


def with_a_wrong_shard(config: dict[str, Any], data: BatchedDataDict) -> torch.Tensor:
    def scaled(spread: Any) -> Any:
        def call(self: LowRank, b: torch.Tensor) -> torch.Tensor:
            factor = 1.001 if torch.distributed.get_rank() == 1 else 1.0
            return factor * spread(self, b)

        return call

    with replaced(LowRank, "_spread", scaled), open_policy(config) as policy:
        return policy.logprobs(BatchedDataDict({"input_ids": data["input_ids"]}))


@pytest.mark.nightly
def test_one_shard_that_is_scaled_is_found(ranks, checkpoint, tmp_path: Path) -> None:
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(1)
    start = peft_models.make_adapters(path, tmp_path / "start", ALL)
    exact = peft_models.logprobs(path, start, data["input_ids"])
    config = adapted(path, LAYOUTS["TP2+SP"].megatron, start, target_modules=ALL)
    for seen in ranks.run(2, with_a_wrong_shard, config, data):
        with pytest.raises(AssertionError):
            assert_equal("logprobs", seen[:, 1:], exact)


DROPPED: dict[str, Any] = {"dropout": 0.3, **ANEW}


def trained(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """What this rank sees of steps without pause, and of its adapters afterwards."""
    with open_policy(config, init_reference_model=False) as policy:
        first = own_steps(policy, data)[0]
        evaluated = policy.train(first, LOSSES["token"](), mbs=1, eval_mode=True)
        steps = [policy.train(b, LOSSES["token"](), mbs=1) for b in own_steps(policy, data)]
        arch, place = policy._engine.table.architecture, policy._engine.place
        held = policy._engine.adapters.held
        shards = {e.megatron: place.shard_of(e.row) for e, _ in held}
        whole = {e.megatron for e, _ in held if not is_split(e.row, arch, shards[e.megatron].size)}
        return {
            "evaluated": evaluated["loss"],
            "losses": [step["loss"] for step in steps],
            "norms": [torch.as_tensor(step["grad_norm"]) for step in steps],
            "adapters": {e.megatron: p.detach().clone() for e, p in held},
            "whole": whole,
        }


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("TP2", "qwen2"),
        ("TP2+SP", "qwen2"),
        ("TP2xCP2+SP", "qwen2"),
        ("EP2xTP2+SP", "qwen3_moe"),
        ("EP2xETP2+TP2", "qwen3_moe"),
    ],
)
def test_dropout_follows_from_the_seed_and_leaves_ranks_with_the_same_adapters(
    ranks, checkpoint, name: str, family: str, position: str
) -> None:
    """Ranks that hold the same adapter have drawn alike, or the gradients were not the sum."""
    path, case = checkpoint(family, tied=False, **SIZES), (LAYOUTS | EXPERT_LAYOUTS)[name]
    data = batches(3)

    def run(**peft: Any) -> list[dict[str, Any]]:
        own = {"dropout_position": position, **DROPPED, **peft}
        return list(ranks.run(case.world, trained, adapted(path, case.megatron, None, **own), data))

    seen, again, without = run(), run(), run(dropout=0.0)
    for one, other, plain in zip(seen, again, without, strict=True):
        assert same(one["losses"], other["losses"]) and same(one["norms"], other["norms"])
        assert same(one["adapters"].values(), other["adapters"].values())
        assert torch.equal(one["evaluated"], plain["evaluated"]), (
            "there is no dropout in evaluation"
        )
        assert not same(one["losses"], plain["losses"])
    for one in seen[1:]:
        for weight in one["whole"] & seen[0]["whole"]:
            assert torch.equal(one["adapters"][weight], seen[0]["adapters"][weight]), weight


def test_dropout_is_of_adapters_alone(ranks, checkpoint) -> None:
    """With B of zeros adapters add nothing, regardless of what is dropped."""
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(1)
    (dropped,) = ranks.run(1, trained, adapted(path, {}, None, dropout=0.5), data)
    (plain,) = ranks.run(1, trained, adapted(path, {}, None), data)
    assert same(dropped["losses"], plain["losses"])
    assert not same(dropped["norms"], plain["norms"])


@pytest.mark.parametrize("name", ["one process", "PP2", "TP2+SP"])
def test_what_is_recomputed_is_dropped_again(ranks, checkpoint, name: str) -> None:
    path, case, data = checkpoint("qwen2", tied=False, **SIZES), LAYOUTS[name], batches(1)
    plain, recomputed = (
        ranks.run(case.world, trained, adapted(path, case.megatron | more, None, **DROPPED), data)
        for more in ({}, FULL)
    )
    for one, other in zip(plain, recomputed, strict=True):
        assert same(one["losses"], other["losses"])
        torch.testing.assert_close(one["norms"], other["norms"], rtol=1e-6, atol=0.0)


def run_of_a_life(
    config: dict[str, Any], data: BatchedDataDict, busy: bool, root: Path
) -> dict[str, Any]:
    """Three steps; if `busy` with refits, exports, generation and all memory states between."""
    with open_policy(config, tokenizer=Tokenizer()) as policy:
        memory_of(policy, settle=policy._session.settle)
        seen: dict[str, Any] = {"losses": []}
        for number, batch in enumerate(own_steps(policy, data)):
            seen["losses"].append(policy.train(batch, LOSSES["token"](), mbs=1)["loss"])
            if busy:
                seen |= between(policy, root / str(number))
        return seen | {"weights": weights_of(policy)}


def between(policy: Any, root: Path) -> dict[str, Any]:
    policy.memory.enter(REFIT)
    transports = KeepingTransport(), KeepingTransport()
    for adapters, transport in enumerate(transports):
        policy.refit(transport, adapters=bool(adapters))
    policy.memory.enter(IDLE)
    policy.memory.enter(LOGPROB)
    policy.reference_logprobs(prompts())
    exported = {name: tensor.clone() for name, tensor in policy.export()}
    policy.export_hf(root)
    done = policy.generate(prompts(), greedy=True)
    policy.memory.enter(TRAIN)
    return {"exported": exported, "sent": [t.session.found for t in transports], "done": done}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("one process", "qwen2"),
        ("TP2+SP", "qwen2"),
        ("PP2xVPP2", "qwen3"),
        ("DP2 distributed optimizer, both overlaps", "qwen2"),
        ("TP2xPP2xDP2+SP", "qwen2"),
        ("EP2xTP2+SP", "qwen3_moe"),
    ],
)
def test_training_is_the_same_with_refits_exports_and_generation_between_steps(
    ranks, checkpoint, tmp_path: Path, name: str, family: str
) -> None:
    path, case = checkpoint(family, tied=False, **SIZES), (LAYOUTS | EXPERT_LAYOUTS)[name]
    data = batches(3)
    config = adapted(path, case.megatron, None, **DROPPED) | generation()
    quiet = ranks.run(case.world, run_of_a_life, config, data, False, tmp_path)
    busy = ranks.run(case.world, run_of_a_life, config, data, True, tmp_path)
    for one, other in zip(busy, quiet, strict=True):
        assert same(one["losses"], other["losses"])
        assert one["weights"].keys() == other["weights"].keys()
        for weight, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][weight]), weight
        for row, length in enumerate(PROMPT_LENGTHS):
            done = one["done"].tokens_BT[row, : length + NEW].tolist()
            assert done == hf_greedy(tmp_path / "2", row)
    whole, alone = ({n: t for one in busy for n, t in one["sent"][kind].items()} for kind in (0, 1))
    assert whole and alone
    for weight, tensor in whole.items():
        assert torch.equal(tensor, busy[0]["exported"][weight]), weight
