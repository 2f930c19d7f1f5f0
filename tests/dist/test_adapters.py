"""Low-rank adapters in every layout, as PEFT adapts transformers' model and torch's AdamW trains
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import margins, oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, SIZES, VOCAB
from tests.dist.test_export import tensors_of
from tests.exact import Exact, assert_equal
from tests.invariance import page
from tests.invariance.further import (
    ADAPTERS,
    FUSED,
    OF_EXPERTS,
    OF_MODULES,
    OF_STACKS,
    PADDED,
    Collected,
    FurtherCell,
)
from tests.invariance.further import LATENT as LATENT_ATTENTION
from tests.invariance.further import PACKED as PACKED_ROWS

STEPS = 2
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "up_proj"]


def adapted(path: Path, megatron: dict[str, Any], adapters: Path | None, **peft: Any) -> Any:
    """A policy's configuration with adapters, from that directory or anew."""
    section = {"enabled": True, "dim": peft_models.RANK, "alpha": peft_models.ALPHA} | peft
    if adapters is not None:
        section["start_from"] = str(adapters)
    return policy_config(path, {**megatron, "peft": section})


def train(config: dict[str, Any], data: BatchedDataDict, mbs: int | None = 1) -> dict[str, Any]:
    """What this rank sees of two steps: before, between and after them."""
    names = ["input_ids"] if mbs else ["input_ids", "input_lengths"]
    read = BatchedDataDict({name: data[name] for name in names})
    with open_policy(config, init_reference_model=False) as policy:
        base = policy.reference_logprobs(read)
        steps = [
            policy.train(batch, LOSSES["token"](), mbs=mbs) for batch in own_steps(policy, data)
        ]
        return {
            "base": base,
            "steps": steps,
            "reference": policy.reference_logprobs(read),
            "logprobs": policy.logprobs(read),
            "adapters": {n: t.clone() for n, t in policy.export(adapters=True)},
            "weights": {n: t.clone() for n, t in policy.export()},
        }


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(ADAPTERS)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


KINDS = {
    "each module's": (ALL, {"target_modules": ALL}, False),
    "some modules'": (SOME, {"target_modules": SOME}, False),
    "fused": (ALL, {}, True),
}


CASES = [
    (name, kind)
    for kind in KINDS
    for name in LAYOUTS
    if (name, kind) != ("TP4 over 2 groups", "some modules'")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_adapters_are_trained_like_pefts_by_torchs_optimizer(
    ranks, checkpoint, measured: Collected, tmp_path: Path, name: str, kind: str
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    modules, chosen, shared = KINDS[kind]
    start = peft_models.make_adapters(path, tmp_path / "start", modules, shared=shared)
    load = peft_models.Loads(start, shared=shared)
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    own = peft_models.is_adapter
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own, load=load)
    expected = hf.read(partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    of_base = Exact.of(path, partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    case = LAYOUTS[name]
    before = tensors_of(path)
    config = adapted(path, case.megatron, start, **chosen)
    results = ranks.run(case.world, train, config, data)
    with margins.recorded() as record:
        for seen in results:
            assert_trained(seen, hf, own, peft_models.saved_name)
            assert seen["weights"].keys() == before.keys()
            assert_equal("logprobs after training", seen["logprobs"][:, 1:], expected)
            assert_equal("logprobs of the base", seen["base"][:, 1:], of_base)
    of = {"each module's": OF_MODULES, "fused": FUSED}.get(kind, kind)
    measured.add(FurtherCell(name, PADDED, of, "qwen2"), record)


def assert_trained(
    seen: dict[str, Any],
    hf: oracle.Learned,
    own: Callable[[str], object],
    saved: Callable[[str], str],
) -> None:
    hf.assert_same_steps(seen["steps"])
    assert torch.equal(seen["base"], seen["reference"])
    trained = {saved(n): w for n, w in hf.exact.weights.items() if own(n) is not None}
    assert trained and trained.keys() <= seen["adapters"].keys()
    for weight, exact in trained.items():
        hf.assert_same_weight(seen["adapters"][weight], exact, weight)


FULL = {
    "activation_checkpointing": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
MLP_OF_LAST = [f"{layer}.mlp.{each}" for layer in (2, 3) for each in ALL[4:]]
LAST = [f"model.layers.{layer}.mlp.*" for layer in (2, 3)]
"""Modules of the second of two stages: the first trains nothing."""
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "recomputed": ("one process", FULL, {}, ALL),
    "recomputed, PP2": ("PP2", FULL, {}, ALL),
    "packed, TP2xCP2+SP": ("TP2xCP2+SP", {}, PACKED, ALL),
    "packed, DP2": ("DP2 distributed optimizer, both overlaps", {}, PACKED, ALL),
    "one stage, PP2": ("PP2", {}, {}, LAST),
    "one stage, distributed": ("PP2", OVERLAPPED, {}, LAST),
    "one stage, recomputed": ("PP2", FULL, {}, LAST),
}


@pytest.mark.parametrize("name", MORE)
def test_recomputed_packed_and_partly_adapted_models_are_trained_alike(
    ranks, checkpoint, measured: Collected, tmp_path: Path, name: str
) -> None:
    layout, megatron, top, modules = MORE[name]
    path = checkpoint("qwen2", tied=False, **SIZES)
    pattern = MLP_OF_LAST if modules is LAST else modules
    start = peft_models.make_adapters(path, tmp_path / "start", pattern)
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    own, load = peft_models.is_adapter, peft_models.Loads(start)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own, load=load)
    case = LAYOUTS[layout]
    config = adapted(path, {**case.megatron, **megatron}, start, target_modules=modules) | top
    results = ranks.run(case.world, train, config, data, 1 if not top else None)
    with margins.recorded() as record:
        for seen in results:
            assert_trained(seen, hf, own, peft_models.saved_name)
    if top and modules is ALL:
        measured.add(FurtherCell(layout, PACKED_ROWS, OF_MODULES, "qwen2"), record)


EXPERTS = [name for name in EXPERT_LAYOUTS if "CP2" not in name or "EP2xCP2" in name]


@pytest.mark.parametrize("name", ["one process", *EXPERTS, "EP2, packed"])
def test_adapters_of_experts_are_trained_like_plain_torchs(
    ranks, checkpoint, measured: Collected, tmp_path: Path, name: str
) -> None:
    path = checkpoint("qwen3_moe", tied=False, **SIZES)
    start = peft_models.make_expert_adapters(path, tmp_path / "start")
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    own, load = peft_models.is_expert_adapter, peft_models.LoadsExperts(start)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own, load=load)
    layout, batching = name.removesuffix(", packed"), PADDED
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    config = adapted(path, case.megatron, start, target_modules=["model.layers.*.mlp.experts.*"])
    if layout != name:
        config, batching = config | PACKED, PACKED_ROWS
    results = ranks.run(case.world, train, config, data, 1 if batching == PADDED else None)
    with margins.recorded() as record:
        for seen in results:
            assert_trained(seen, hf, own, peft_models.saved_expert_name)
    measured.add(FurtherCell(layout, batching, OF_EXPERTS, "qwen3_moe"), record)


LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.parametrize("name", ["one process", "TP2+SP", "EP2xTP2+SP"])
def test_adapters_of_latent_attention_are_trained_like_pefts(
    ranks, checkpoint, measured: Collected, tmp_path: Path, name: str
) -> None:
    path = checkpoint("deepseek_v3", tied=False, **SIZES)
    start = peft_models.make_adapters(path, tmp_path / "start", LATENT)
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    own, load = peft_models.is_adapter, peft_models.Loads(start)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own, load=load)
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    config = adapted(path, case.megatron, start, target_modules=LATENT)
    results = ranks.run(case.world, train, config, data)
    with margins.recorded() as record:
        for seen in results:
            assert_trained(seen, hf, own, peft_models.saved_name)
    measured.add(FurtherCell(name, PADDED, LATENT_ATTENTION, "deepseek_v3"), record)


STACKS = ["gate_up_proj", "down_proj"]
STACKED = [
    ("one process", STACKS),
    ("EP2", STACKS),
    ("EP2xTP2+SP", STACKS),
    ("EP2xPP2", ["down_proj"]),
    ("EP2xCP2", STACKS),
    ("EP4xDP2, distributed optimizer, overlaps", STACKS),
    ("EP4", ["gate_up_proj"]),
    ("TP2+SP, experts whole", STACKS),
]


@pytest.mark.parametrize(("name", "stacks"), STACKED)
def test_adapters_of_stacked_experts_are_trained_like_pefts(
    ranks, checkpoint, measured: Collected, tmp_path: Path, name: str, stacks: list[str]
) -> None:
    """PEFT adapts the parameters themselves (`target_parameters`)."""
    path, modules = checkpoint("gpt_oss", tied=False, **SIZES), ["q_proj", "o_proj"]
    parameters = [f"experts.{each}" for each in stacks]
    start = peft_models.make_adapters(path, tmp_path / "start", modules, stacks=parameters)
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    own, load = peft_models.is_adapter, peft_models.Loads(start)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own, load=load)
    expected = hf.read(partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    config = adapted(path, case.megatron, start, target_modules=[*modules, *stacks])
    results = ranks.run(case.world, train, config, data)
    with margins.recorded() as record:
        for seen in results:
            assert_trained(seen, hf, own, peft_models.saved_name)
            assert_equal("logprobs after training", seen["logprobs"][:, 1:], expected)
    if stacks is STACKS:
        measured.add(FurtherCell(name, PADDED, OF_STACKS, "gpt_oss"), record)
