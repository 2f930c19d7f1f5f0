"""Every family whose layers tensor-parallel ranks share under FSDP2 reads and learns what one rank
does. With plain gradient descent at rate 1 weights differ as gradients do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.engines.hugging_face.assemble import choose_experts
from megatron_policy.engines.hugging_face.module import build_module
from megatron_policy.errors import ConfigError, ConversionError
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy
from tests.dist.fsdp_cases import BATCHINGS, data, share
from tests.dist.layouts import SIZES
from tests.dist.shortcuts import refusal
from tests.families import SAMPLES

TENSOR = {"tensor_parallel_size": 2}
KEYS = {"TP2": TENSOR, "TP2+SP": TENSOR | {"sequence_parallel": True}}
SEEDS = {"qwen3_moe": 1, "gpt_oss": 3, "deepseek_v3": 7, "mixtral": 11}
"""With which no token is about to take another expert."""


def learnt(config: dict[str, Any]) -> dict[str, Any]:
    with open_policy(config) as policy:
        own = share(data(), policy)
        texts = BatchedDataDict({key: own[key] for key in ("input_ids", "input_lengths")})
        seen = {"logprobs": policy.logprobs(texts), "entropy": policy.entropy(texts)}
        step = policy.train(share(data().get_batch(0, GLOBAL_BATCH), policy), LOSSES["token"]())
        seen["norm"] = step["grad_norm"]
        return seen | {name: tensor.clone() for name, tensor in policy.export()}


def config_of(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    optimizer = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}
    mixing = read_config(path)["model_type"] in MIXING
    batching = BATCHINGS["padded" if mixing else "packed"]
    return fsdp_config(path, keys, max_grad_norm=0.0, **batching) | {"optimizer": optimizer}


MIXING = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention"),
    **dict.fromkeys(("granitemoehybrid", "kimi_linear"), "linear_attention"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_omni", "olmo_hybrid"), "linear_attention"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "linear_attention"),
    "falcon_h1": "hybrid",
}
"""Families with other layers than attention, by their names in transformers."""
CASES = [
    (family, layout, {})
    for family, samples in SAMPLES.items()
    for layout in KEYS
    if samples.shared and (layout == "TP2" or family not in MIXING)
]
# 22 fp32 numbers are no multiple of 16 bytes, which torch's grouped products need.
CASES.append(("mixtral", "TP2", {"ffn": 44}))
# Both ranks hold the one key-value head.
CASES.append(("qwen2", "TP2", {"groups": 1}))
DAILY = (("phi3", "TP2+SP", {}), *CASES[-2:])


@pytest.mark.parametrize(
    ("family", "layout", "sizes"),
    [pytest.param(*c, marks=[pytest.mark.daily] * (c in DAILY)) for c in CASES],
)
def test_ranks_that_share_layers_read_and_learn_as_one(
    ranks, checkpoint, family: str, layout: str, sizes: dict[str, int]
) -> None:
    path = checkpoint(family, **SIZES | sizes, seed=SEEDS.get(family, 0))
    (expected,) = ranks.run(1, learnt, config_of(path, {}))
    for found in ranks.run(2, learnt, config_of(path, KEYS[layout])):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5, rtol=1e-5), name


UNSHARED = dict.fromkeys(
    ("granitemoe", "granitemoehybrid", "qwen3_vl_moe"),
    "where each expert has its gates above its up projections: set it",
)
UNSHARED["kimi_k25"] = "by Chunk, PermuteForRope when it loads this model, which is not supported"
UNSHARED["nemotron_h_omni"] = "by Chunk when it loads this model, which is not supported under FSDP"
"""Why ranks cannot share the layers of a family whose plan transformers has."""


@pytest.mark.parametrize("family", [f for f, each in SAMPLES.items() if not each.shared])
def test_ranks_cannot_share_layers_without_a_plan_that_can_be_followed(
    ranks, checkpoint, family: str
) -> None:
    config, architecture = (
        config_of(checkpoint(family, **SIZES), TENSOR),
        SAMPLES[family].architecture,
    )
    why = UNSHARED.get(family, f"no plan of how tensor-parallel ranks share {architecture}")
    joined = ("kimi_k25", "nemotron_h_omni")  # whose files have what transformers divides
    kind = ConversionError if family in joined else ConfigError
    for said in ranks.run(2, refusal, config, kind):
        assert why in said


@pytest.mark.parametrize("family", MIXING)
def test_rows_stay_whole_and_apart_where_tokens_mix_elsewhere(
    ranks, checkpoint, family: str
) -> None:
    path = checkpoint(family, **SIZES)
    packed = fsdp_config(path, {}, **BATCHINGS["packed"])
    for world, key, config in (
        (1, "sequence_packing", packed),
        (2, "dtensor_cfg.sequence_parallel", config_of(path, KEYS["TP2+SP"])),
        (2, "dtensor_cfg.context_parallel_size", config_of(path, {"context_parallel_size": 2})),
    ):
        for said in ranks.run(world, refusal, config, ConfigError):
            assert f"policy.{key} needs layers" in said
            assert f"has {MIXING[family]}: use padded or dynamic batches without it" in said


@pytest.mark.parametrize(
    ("family", "ffn", "dtype", "chosen"),
    [
        ("mixtral", 24, torch.bfloat16, "grouped_mm"),
        ("mixtral", 20, torch.bfloat16, "eager"),
        ("mixtral", 20, torch.float32, "grouped_mm"),
        ("mixtral", 22, torch.float32, "eager"),
        ("gpt_oss", 20, torch.float16, "eager"),  # its weights are transposed
        ("qwen2", 22, torch.float32, "eager"),  # has no experts
    ],
)
def test_experts_whose_sizes_grouped_products_refuse_are_computed_one_by_one(
    checkpoint, caplog, family: str, ffn: int, dtype: Any, chosen: str
) -> None:
    path = checkpoint(family, **SIZES | {"ffn": ffn})
    module = build_module(PolicyConfig.parse(config_of(path, {})), surrounded=False)
    before = getattr(module.config, "_experts_implementation", None)
    choose_experts(module, dtype)
    if before is None:
        return  # this transformers has one way for experts
    assert module.config._experts_implementation == chosen
    said = f"64 x {ffn}" if family == "mixtral" else f"{ffn} x 64"
    assert (said in caplog.text) == (chosen != before)
