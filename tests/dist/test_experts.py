"""Models with experts compute, learn, generate and export like transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.formats.hf_files import HfReader
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    logits_of,
    open_policy,
    own_share,
    policy_config,
    train_two_steps,
)
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, layout
from tests.dist.test_export import assert_same_tensors, export
from tests.dist.test_generate import (
    NEW,
    PROMPT_LENGTHS,
    Tokenizer,
    assert_written_as_read,
    continue_prompts,
    generation,
    hf_greedy,
    prompts,
)
from tests.dist.test_malformed_batches import outcome
from tests.exact import Exact, assert_equal
from tests.expert_families import EXPERTS, YARN, draw
from tests.invariance.cases import MODELS

DRAWS = 6
VOCAB, LENGTH = 200, 24
UNEVEN = "EP2xPP2, stages of 1 and 3 layers"
EVERY_LAYOUT = {
    **LAYOUTS,
    **EXPERT_LAYOUTS,
    UNEVEN: layout(4, pp=2, num_layers_in_first_pipeline_stage=1, expert_model_parallel_size=2),
}
TRAINED = {
    "mixtral": ("one process", "PP2", "DP2", "TP2+SP"),
    "qwen2_moe": ("PP2 uneven", "TP2+SP"),
    "qwen3_moe": ("one process", "PP2", "DP2 distributed optimizer, both overlaps", "TP2+SP"),
    "deepseek_v3": ("one process", UNEVEN, "DP2", "PP2xVPP2", "TP2xPP2xDP2+SP"),
    "ernie4_5_moe": ("PP2", "EP2xTP2+SP"),
    "glm4_moe": ("PP2", "TP2+SP"),
    "glm4_moe_lite": ("PP2", "TP2+SP"),
    "gpt_oss": ("one process", "PP2"),
    "minimax_m2": ("PP2", "TP2+SP"),
    "olmoe": ("PP2", "TP2+SP"),
}
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}


@pytest.mark.daily
@pytest.mark.parametrize("family", EXPERTS)
def test_random_models_compute_the_logits_of_transformers(ranks, tmp_path, family: str) -> None:
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


@pytest.mark.nightly
def test_every_family_computes_and_learns_like_hf_under_its_layouts(ranks, learned) -> None:
    family, path, data, logits, hf = learned
    for name in TRAINED[family]:
        case = EVERY_LAYOUT[name]
        config = policy_config(path, case.megatron, logprob_batch_size=GLOBAL_BATCH)
        for seen in ranks.run(case.world, train_two_steps, config, "token", data, VOCAB, True):
            assert_equal("logits", seen["before"]["logits"], logits, name)
            hf.assert_same_steps(seen["steps"], name)
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
    ("family", "name"),
    [
        ("deepseek_v3", "EP2xTP2+SP"),
        ("deepseek_v3", UNEVEN),
        ("deepseek_v3", "TP2+SP"),
        ("ernie4_5_moe", "EP2xTP2+SP"),
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
def test_mixed_dtypes_come_back_bit_equal(ranks, tmp_path, family: str, name: str) -> None:
    """Weights in bf16; in transformers as in Megatron-Core, correction biases stay in fp32."""
    source = make_checkpoint(tmp_path / "source", family, dtype="bfloat16", **SMALL)
    widen_correction_biases(source)
    case = EVERY_LAYOUT[name]
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
def test_a_cache_of_keys_generates_what_transformers_does(ranks, tmp_path, family: str) -> None:
    scaled = {"rope_scaling": YARN} if family == "deepseek_v3" else {}
    path = make_checkpoint(tmp_path, family, **SMALL | {"vocab": 251}, **scaled)
    config = policy_config(path, {}, **generation())
    (seen,) = ranks.run(1, continue_prompts, config, None, True)
    (done,) = seen["done"]
    for row in range(len(PROMPT_LENGTHS)):
        expected = hf_greedy(path, row)
        assert done.tokens_BT[row, : done.lengths_B[row]].tolist() == expected
    assert_written_as_read(path, seen)


OWN_ROWS = ((0, 1, 2, 3), (4,))
"""The prompts of each replica, as wide as its longest; those of the first need two caches."""


def continue_own_prompts(config: dict[str, Any], eos: int) -> dict[str, Any]:
    """What each replica makes of its own prompts; a single one has all of them."""
    with open_policy(
        config, tokenizer=Tokenizer(eos), init_optimizer=False, init_reference_model=False
    ) as policy:
        alone = policy.topology.dp == 1
        rows = [*range(len(PROMPT_LENGTHS))] if alone else [*OWN_ROWS[policy.coords.dp]]
        own = prompts().select_indices(rows)
        own["input_ids"] = own["input_ids"][:, : int(own["input_lengths"].max())]
        done = policy.generate(own, greedy=True)
        read = policy.logprobs(BatchedDataDict({"input_ids": done.tokens_BT}))
        return {"coords": policy.coords, "rows": rows, "done": [done], "read": read}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "EP2"),
        ("gpt_oss", "EP2xTP2+SP"),
        ("mixtral", "EP2xPP2"),
        ("qwen3_moe", "EP2xETP2+TP2"),
    ],
)
def test_replicas_that_share_experts_continue_their_own_prompts_like_transformers(
    ranks, checkpoint, family: str, name: str
) -> None:
    path, case = checkpoint(family, **MODELS[family]), EXPERT_LAYOUTS[name]
    ends = [hf_greedy(path, row)[length:] for row, length in enumerate(PROMPT_LENGTHS)]
    eos = ends[4][2]  # which ends the second replica's only row, and what comes after it
    config = policy_config(path, case.megatron, **generation())
    found, replicas = {}, set()
    for seen in ranks.run(case.world, continue_own_prompts, config, eos):
        (done,), rows = seen["done"], seen["rows"]
        for index, row in enumerate(rows):
            count = ends[row].index(eos) + 1 if eos in ends[row] else NEW
            assert done.generated_B[index] == count
            text = done.tokens_BT[index, : PROMPT_LENGTHS[row] + count].tolist()
            assert text == hf_greedy(path, row)[: len(text)]
            found[row] = count
        lengths = [PROMPT_LENGTHS[row] for row in rows]
        assert_written_as_read(path, seen, lengths=lengths)
        replicas.add(seen["coords"].dp)
    assert found[4] <= 3 < max(found.values()) == NEW
    assert len(found) == len(PROMPT_LENGTHS)
    assert len(replicas) == case.world // (case.tp * case.megatron["pipeline_model_parallel_size"])


def refuse_on_one_replica(config: dict[str, Any]) -> list[str]:
    """What this rank hears if only the last replica's data have a token that does not exist."""
    with open_policy(config, tokenizer=Tokenizer(), init_reference_model=False) as policy:
        data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
        before, bad = policy.logprobs(data), BatchedDataDict(dict(data))
        if policy.coords.dp == policy.topology.dp - 1:
            bad["input_ids"] = bad["input_ids"].clone()
            bad["input_ids"][1, 2] = MODELS["mixtral"]["vocab"]
        calls = {
            "log-probabilities": policy.logprobs,
            "entropy": policy.entropy,
            "top k": lambda data: policy.topk_logits(data, 2),
            "generation": policy.generate,
            "training": lambda data: policy.train(data, LOSSES["token"](), mbs=1),
        }
        said = []
        for call in calls.values():
            said.append(outcome(call, bad))
            assert torch.equal(policy.logprobs(data), before)
        policy.train(data, LOSSES["token"](), mbs=1)
        assert not torch.equal(policy.logprobs(data), before)
        return said


@pytest.mark.parametrize("name", ["EP2", "EP2xPP2"])
def test_data_that_one_replica_refuses_are_refused_by_all_that_share_its_experts(
    ranks, checkpoint, name: str
) -> None:
    path, case = checkpoint("mixtral", **MODELS["mixtral"]), EXPERT_LAYOUTS[name]
    config = policy_config(path, case.megatron, **generation())
    heard = ranks.run(case.world, refuse_on_one_replica, config)
    for said in heard:
        assert len(said) == 5 and all(each.startswith("refused: ") for each in said), said
        others = ["another data-parallel rank" in each for each in said]
        named = ["251 in row 1 at position 2" in each for each in said]
        assert all(others) or all(named), said
    assert sum("another" in said[0] for said in heard) == case.world // 2
