"""Models whose layers hand a state on, some of which are not offered yet: their logits, and two
steps of training under every kind of layout and batching, are those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture.recurrence import CHUNK
from megatron_policy.converters.registry import FAMILIES, PREPARED
from tests import margins, oracle
from tests.checkpoints import make_checkpoint
from tests.dist import test_mtp_training
from tests.dist.cases import GLOBAL_BATCH, LOSSES, logits_of, open_policy, policy_config
from tests.dist.layouts import SIZES
from tests.dist.test_export import assert_same_tensors, export
from tests.dist.test_generate import assert_continued_like_hf, continue_prompts, generation
from tests.dist.test_invariance import (
    assert_microbatches_are_what_the_cell_says,
    compared,
    rows_of,
    tolerances,
)
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES
from tests.invariance.cases import CLOSEST, Cell, config_of
from tests.invariance.cases import LAYOUTS as CASES
from tests.invariance.measure import run_cell
from tests.invariance.oracle import truth
from tests.mtp_checkpoints import add_mtp_layers
from tests.mtp_oracle import learned
from tests.samples import RECURRENT, Fields, Samples

NOT_OFFERED = {
    "lfm2_moe": Samples(
        architecture="Lfm2MoeForCausalLM",
        epsilon="norm_eps",
        experts=True,
        tiny={
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        read=(),
        published={},
    ),
    # With as many channels of values as of keys: transformers saves convolutions cut into thirds.
    "olmo_hybrid": Samples(
        architecture="OlmoHybridForCausalLM",
        tiny={
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
    "falcon_h1": Samples(
        architecture="FalconH1ForCausalLM",
        tiny={
            "mamba_n_heads": 8,
            "mamba_d_head": 4,
            "mamba_d_ssm": 32,
            "mamba_n_groups": 4,
            "mamba_d_state": 6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "embedding_multiplier": 1.5,
            "key_multiplier": 0.8,
            "lm_head_multiplier": 0.6,
            "mlp_multipliers": [0.9, 1.3],
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
            "ssm_out_multiplier": 0.6,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
    "kimi_linear": Samples(
        architecture="KimiLinearForCausalLM",
        experts=True,
        tiny={
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
    "nemotron_h": Samples(
        architecture="NemotronHForCausalLM",
        epsilon="layer_norm_epsilon",
        head_dim=True,
        tiny={
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "n_groups": 2,
            "ssm_state_size": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
    "granitemoehybrid": Samples(
        architecture="GraniteMoeHybridForCausalLM",
        tiny={
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
}
LATENT = {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}
UNEVEN = ["moe", "linear_attention", "full_attention", "moe", "mlp", "linear_attention"]
HYBRIDS: dict[str, Fields] = {
    "lfm2": SIZES | {"conv_bias": True},
    "lfm2_moe": SIZES,
    "falcon_h1": SIZES,
    "kimi_linear": SIZES,
    "olmo_hybrid": SIZES,
    "qwen3_next": SIZES | {"attention_bias": True},
    "qwen3_5_text": SIZES | {"attention_bias": True},
    "qwen3_5_moe_text": SIZES,
    "nemotron_h": SIZES,
    "nemotron_h, experts": SIZES | {"layers_block_type": UNEVEN, "seed": 4},
    "nemotron_h, latent experts": SIZES | LATENT | {"moe_latent_size": 20, "seed": 1},
    "granitemoehybrid": SIZES,
    "granitemoehybrid, experts": SIZES
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
    },
}
"""Models, whose names begin with those of their families, with the keywords of their checkpoints.
Seeds are such that no token is about to take another expert.
"""
LAYOUTS = (
    ("one process", "padded", "token"),
    ("one process", "packed", "policy gradient"),
    ("TP2", "padded", "token"),
    ("TP2+SP", "packed", "policy gradient"),
    ("PP2", "dynamic", "token"),
    ("PP2xVPP2", "packed", "token"),
    ("CP2", "padded", "token"),
    ("CP4", "packed", "policy gradient"),
    ("TP4 over 2 key-value groups", "packed", "token"),
    ("TP2xCP2+SP", "packed", "token"),
    ("FSDP2 x 2", "padded", "token"),
    ("FSDP1 x 2", "dynamic", "policy gradient"),
)
WITH_EXPERTS = (
    *(each for each in LAYOUTS if each[0] not in ("TP2", "TP4 over 2 key-value groups")),
    ("EP2xTP2+SP", "padded", "token"),
    ("EP2xCP2", "packed", "policy gradient"),
)
"""Tensor-parallel ranks share experts with sequence parallelism alone."""
REFUSED = {("olmo_hybrid", "TP4 over 2 key-value groups")}
"""Each rank would normalise keys of which others have parts too."""
PREDICTED_DAILY = {("qwen3_next", "TP2+SP")}
DAILY = {
    ("TP2+SP", "lfm2"),
    ("TP2+SP", "qwen3_next"),
    ("CP2", "nemotron_h"),
    ("EP2xTP2+SP", "nemotron_h, latent experts"),
    ("TP2xCP2+SP", "granitemoehybrid"),
}
GENERATED_DAILY = {("qwen3_next", "PP2xVPP2")}
LONG_DAILY = {("qwen3_next", "CP4")}


@pytest.fixture(autouse=True)
def offered() -> Iterator[None]:
    with patch.dict(FAMILIES, PREPARED), patch.dict(SAMPLES, NOT_OFFERED):
        yield


def run_offered(run: Callable[..., Any], *args: Any) -> Any:
    """`run` on a rank that takes these families."""
    with patch.dict(FAMILIES, PREPARED):
        return run(*args)


def family_of(model: str) -> str:
    return model.partition(",")[0]


def has_experts(model: str) -> bool:
    return "_moe" in family_of(model) or model == "qwen3_next" or "experts" in model


@pytest.mark.parametrize("model", HYBRIDS)
def test_logits_are_those_of_transformers(ranks, tmp_path: Path, model: str) -> None:
    given = HYBRIDS[model]
    path = make_checkpoint(tmp_path / "hf", family_of(model), tokenizer=False, **given)
    for length in (1, 31):
        tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(0))
        ((logits,),) = ranks.run(1, run_offered, logits_of, [(path, SIZES["vocab"])], tokens)
        assert_equal("logits", logits, Exact.of(path, lambda m, t=tokens: m(t).logits), length)


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        pytest.param(
            model,
            Cell(layout, batching, loss, family_of(model)),
            id=f"{model}, {layout}, {batching}",
            marks=[pytest.mark.nightly] * ((layout, model) not in DAILY),
        )
        for model in HYBRIDS
        for layout, batching, loss in (WITH_EXPERTS if has_experts(model) else LAYOUTS)
        if (model, layout) not in REFUSED
    ],
)
def test_two_steps_are_those_of_transformers(ranks, checkpoint, model: str, cell: Cell) -> None:
    path = checkpoint(cell.family, **HYBRIDS[model])
    given = (run_cell, cell, config_of(cell, path), rows_of(cell, path))
    results = ranks.run(cell.of.world, run_offered, *given)
    assert_microbatches_are_what_the_cell_says(cell, results)
    assert not has_experts(model) or truth(cell, path).closest > CLOSEST
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)


GENERATING = ("one process", "TP2+SP", "PP2xVPP2", "CP2")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[pytest.mark.nightly] * (case not in GENERATED_DAILY))
        for model in HYBRIDS
        for layout in GENERATING
        if (case := (model, layout))
    ],
)
def test_greedy_continuations_are_those_of_transformers(
    ranks, checkpoint, model: str, layout: str
) -> None:
    path, case = checkpoint(family_of(model), **HYBRIDS[model]), CASES[layout]
    given = (continue_prompts, policy_config(path, case.megatron, **generation()), None, True)
    for seen in ranks.run(case.world, run_offered, *given):
        assert_continued_like_hf(path, seen)


LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 1, 3, 1, 13, 2, 7, 30, 1, 5, 9, 2, 4, 1, 21, 6, 3, 8)
"""Of twenty sequences: most are shorter than the pieces into which context-parallel ranks cut."""
TOKENS = 1024
"""Of a microbatch: more than all of them have, however they are padded."""
NOT_COUNTED, LEFT_OUT = 6, 9
"""The row none of whose tokens count, and the one that does not count."""


def twenty() -> BatchedDataDict:
    random = torch.Generator().manual_seed(5)
    lengths, width = torch.tensor(LENGTHS), max(LENGTHS)
    inside = torch.arange(width) < lengths.unsqueeze(1)
    mask, sample_mask = inside.long(), torch.ones(len(LENGTHS))
    mask[NOT_COUNTED], sample_mask[LEFT_OUT] = 0, 0.0
    tokens = torch.randint(1, SIZES["vocab"], (len(LENGTHS), width), generator=random)
    return BatchedDataDict(
        {
            "input_ids": torch.where(inside, tokens, 0),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": sample_mask,
        }
    )


def learn_twenty(config: dict[str, Any]) -> dict[str, Any]:
    """What a policy reads, and makes of all rows in one microbatch; weights by HF names."""
    data = twenty()
    texts = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
    with open_policy(config, init_reference_model=False) as policy:
        seen = {"logprobs": policy.logprobs(texts)}
        seen["step"] = policy.train(data, LOSSES["token"](), gbs=len(LENGTHS))
        # As nemotron_h calls in memory what its files call the backbone.
        named = ((name.replace("backbone.", "model."), each) for name, each in policy.export())
        return seen | {"weights": {name: each.clone() for name, each in named}}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[pytest.mark.nightly] * (case not in LONG_DAILY))
        for model in HYBRIDS
        for layout in ("one process", "TP2+SP", "CP4", "TP2xCP2+SP")
        if (case := (model, layout))
    ],
)
def test_twenty_sequences_of_a_row_are_apart_however_short_they_are(
    ranks, checkpoint, model: str, layout: str
) -> None:
    path, case, data = checkpoint(family_of(model), **HYBRIDS[model]), CASES[layout], twenty()
    budget = {"enabled": True, "train_mb_tokens": TOKENS, "logprob_mb_tokens": TOKENS}
    sizes = {"train_global_batch_size": len(LENGTHS), "max_total_sequence_length": 2 * CHUNK}
    config = policy_config(path, case.megatron, sequence_packing=budget, **sizes)
    logprobs = Exact.of(path, lambda m: oracle.hf_logprobs(m, data["input_ids"]))
    hf = oracle.Learned.of(path, data, len(LENGTHS), oracle.token_level)
    inside = torch.arange(max(LENGTHS)) < data["input_lengths"].unsqueeze(1)
    for seen in ranks.run(case.world, run_offered, learn_twenty, config):
        assert_equal("logprobs", seen["logprobs"][:, 1:][inside[:, 1:]], logprobs[inside[:, 1:]])
        assert len(seen["step"]["microbatch_metrics"]["valid"]) == 1
        hf.assert_same_steps([seen["step"]])
        hf.assert_same_weights(seen["weights"])


PREDICTING = [
    pytest.param(
        family, name, marks=[pytest.mark.nightly] * ((family, name) not in PREDICTED_DAILY)
    )
    for family in ("qwen3_next", "qwen3_5_text")
    for name in ("one process", "TP2+SP", "PP2", "CP2", "EP2")
    if name != "EP2" or family == "qwen3_next"
]


@pytest.mark.parametrize(("family", "name"), PREDICTING)
def test_prediction_of_further_tokens_trains_as_its_plain_form(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    path = add_mtp_layers(make_checkpoint(tmp_path, family, **test_mtp_training.SMALL))
    data, case = test_mtp_training.DATA, test_mtp_training.LAYOUTS[name]
    expected = learned(path, data, GLOBAL_BATCH, factor=test_mtp_training.FACTOR)
    config = policy_config(path, case.megatron | test_mtp_training.MTP)
    results = ranks.run(case.world, run_offered, test_mtp_training.train, config)
    test_mtp_training.assert_learned_alike(results, expected, name)


def put_beside_tower(source: Path, path: Path) -> Path:
    """The text model at `source` as published ones are: within a model that also has a tower."""
    text = json.loads((source / "config.json").read_text())
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    tower = sizes | {"patch_size": 4, "out_hidden_size": text["hidden_size"]}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    own = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    both = load_file(path / "model.safetensors") | own
    save_file(both, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "predicting",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["left out", "predicting"],
)
def test_a_text_model_beside_a_tower_computes_alike_and_is_exported_with_it(
    ranks, tmp_path: Path, predicting: bool
) -> None:
    sizes = test_mtp_training.SMALL
    text = add_mtp_layers(make_checkpoint(tmp_path / "text", "qwen3_5_text", **sizes))
    path, case = put_beside_tower(text, tmp_path / "hf"), test_mtp_training.LAYOUTS["PP2"]
    tokens = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    ((logits,),) = ranks.run(1, run_offered, logits_of, [(path, sizes["vocab"])], tokens)
    assert_equal("logits", logits, Exact.of(text, lambda m: m(tokens).logits))
    config = policy_config(path, case.megatron | (test_mtp_training.MTP if predicting else {}))
    ranks.run(2, run_offered, export, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", path)
