"""Models with experts compute, learn, generate and export like transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_policy.converters.formats.hf_files import HfReader
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    logits_of,
    open_policy,
    policy_config,
    train_two_steps,
)
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.dist.test_export import assert_same_tensors, export
from tests.dist.test_generate import (
    PROMPT_LENGTHS,
    assert_written_as_read,
    continue_prompts,
    generation,
    hf_greedy,
)
from tests.exact import Exact, assert_equal
from tests.expert_families import EXPERTS, YARN, draw

DRAWS = 6
VOCAB, LENGTH = 200, 24
TRAINED = {
    "mixtral": ("one process", "PP2", "DP2", "TP2+SP"),
    "qwen2_moe": ("PP2 uneven", "TP2+SP"),
    "qwen3_moe": ("one process", "PP2", "DP2 distributed optimizer, both overlaps", "TP2+SP"),
    "deepseek_v3": ("one process", "PP2", "DP2", "PP2xVPP2", "TP2xPP2xDP2+SP"),
    "glm4_moe": ("PP2", "TP2+SP"),
    "glm4_moe_lite": ("PP2", "TP2+SP"),
    "gpt_oss": ("one process", "PP2"),
    "minimax_m2": ("PP2", "TP2+SP"),
    "olmoe": ("PP2", "TP2+SP"),
}
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}


@pytest.mark.parametrize("family", EXPERTS)
def test_random_models_compute_the_logits_of_transformers(
    ranks, tmp_path: Path, family: str
) -> None:
    drawn = [draw(family, seed) for seed in range(DRAWS)]
    paths = [
        make_checkpoint(tmp_path / str(number), family, tokenizer=False, **sizes)
        for number, sizes in enumerate(drawn)
    ]
    tokens = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    models = [(path, sizes["vocab"]) for path, sizes in zip(paths, drawn, strict=True)]
    (results,) = ranks.run(1, logits_of, models, tokens)
    for sizes, path, logits in zip(drawn, paths, results, strict=True):
        assert_equal("logits", logits, Exact.of(path, lambda m: m(tokens).logits), sizes)


@pytest.fixture(scope="module", params=TRAINED)
def learned(request, tmp_path_factory) -> tuple[str, Path, Any, Exact, oracle.Learned]:
    """A family, its checkpoint, data, HF's logits of it, and what HF learns from it."""
    family = request.param
    path = tmp_path_factory.mktemp(family)
    make_checkpoint(path, family, **SMALL)
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    logits = Exact.of(path, lambda m: m(data["input_ids"]).logits)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level)
    return family, path, data, logits, hf


def test_every_family_computes_and_learns_like_hf_under_its_layouts(ranks, learned) -> None:
    family, path, data, logits, hf = learned
    for layout in TRAINED[family]:
        case = LAYOUTS[layout]
        config = policy_config(path, case.megatron, logprob_batch_size=GLOBAL_BATCH)
        for seen in ranks.run(case.world, train_two_steps, config, "token", data, VOCAB, True):
            assert_equal("logits", seen["before"]["logits"], logits, layout)
            hf.assert_same_steps(seen["steps"], layout)
            assert seen["unchanged"]
            reference = seen["before"]["logprobs"]
            torch.testing.assert_close(seen["reference"], reference, rtol=0, atol=1e-6)


def train_and_compare(config: dict[str, Any], steps: int) -> dict[str, bool]:
    """Which of the weights moved in training."""
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
        for _ in range(steps):
            policy.train(data, LOSSES["token"](), mbs=2)
        return {name: not torch.equal(before[name], p) for name, p in policy.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True])
def test_routers_can_be_frozen_and_their_correction_biases_always_are(
    ranks, learned, frozen: bool
) -> None:
    _, path, *_ = learned
    config = policy_config(path, {"freeze_moe_router": frozen, "moe_router_dtype": "fp64"})
    (moved,) = ranks.run(1, train_and_compare, config, 2)
    for name, has_moved in moved.items():
        router = ".mlp.router." in name
        stays = name.endswith("expert_bias") or (router and frozen)
        if "local_experts" not in name:  # no token may have taken an expert
            assert has_moved is not stays, name
    assert any(".mlp.router.weight" in name for name in moved)
    assert any(moved[name] for name in moved if "local_experts" in name)


def test_recomputing_activations_changes_no_gradient(ranks, learned) -> None:
    _, path, data, _, hf = learned
    full = {"activation_checkpointing": True, "recompute_granularity": "full"}
    config = policy_config(path, full)
    (seen,) = ranks.run(1, train_two_steps, config, "token", data, VOCAB, False)
    hf.assert_same_steps(seen["steps"])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", "EP2xTP2+SP"),
        ("deepseek_v3", "PP2 uneven"),
        ("deepseek_v3", "TP2+SP"),
        ("glm4_moe", "DP2"),
        ("gpt_oss", "EP2xPP2"),
        ("gpt_oss", "PP2"),
        ("minimax_m2", "TP2+SP"),
        ("mixtral", "TP2+SP"),
        ("qwen2_moe", "TP2xPP2xDP2+SP"),
        ("qwen3_moe", "EP2xETP2+TP2"),
        ("qwen3_moe", "EP2xTP2xPP2xCP2+SP, distributed optimizer, overlaps"),
    ],
)
def test_mixed_dtypes_come_back_bit_equal(ranks, tmp_path: Path, family: str, layout: str) -> None:
    """Weights in bf16; in transformers as in Megatron-Core, correction biases stay in fp32."""
    source = make_checkpoint(tmp_path / "source", family, dtype="bfloat16", **SMALL)
    widen_correction_biases(source)
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    config = policy_config(source, case.megatron, precision="bfloat16")
    ranks.run(case.world, export, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", source)


def widen_correction_biases(path: Path) -> None:
    """Give the checkpoint's correction biases values that bf16 could not hold."""
    file = path / "model.safetensors"
    with HfReader(path) as reader:
        tensors = {name: reader.tensor(name).clone() for name in reader.shapes}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float() + 1e-5
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_a_cache_of_keys_generates_what_transformers_does(
    ranks, tmp_path: Path, family: str
) -> None:
    scaled = {"rope_scaling": YARN} if family == "deepseek_v3" else {}
    path = make_checkpoint(tmp_path, family, **SMALL | {"vocab": 251}, **scaled)
    config = policy_config(path, {}, **generation())
    (seen,) = ranks.run(1, continue_prompts, config, None, True)
    (done,) = seen["done"]
    for row in range(len(PROMPT_LENGTHS)):
        expected = hf_greedy(path, row)
        assert done.tokens_BT[row, : done.lengths_B[row]].tolist() == expected
    assert_written_as_read(path, seen)
