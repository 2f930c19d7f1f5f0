"""The files in configs/ fit their models, and a file that cannot be read says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.converters.architecture.traits import Moe, Scoring
from megatron_policy.errors import ConfigError
from tests.unit.test_layout import shape

CONFIGS = Path(__file__).parents[2] / "configs"

SHAPES = {
    "grpo_qwen2_cpu.yaml": (2, (24, 14, 2, 4864)),
    "grpo_qwen2_1b_1gpu.yaml": (1, (28, 12, 2, 8960)),
    "sft_llama_8b_tp4_pp2.yaml": (16, (32, 32, 8, 14336)),
    "sft_qwen2_fsdp2.yaml": (4, (24, 14, 2, 4864)),
    "dpo_mistral_7b_tp2_pp2_vpp2.yaml": (8, (32, 32, 8, 14336)),
    "grpo_qwen3_30b_a3b_tp2_ep8.yaml": (16, (48, 32, 4, 6144)),
    "grpo_qwen2_7b_8h100.yaml": (8, (28, 28, 4, 18944)),
    "grpo_qwen3_8b_tp2_pp4_uneven.yaml": (8, (36, 32, 8, 12288)),
}
"""Ranks, and the model's layers, attention heads, key-value heads and feed-forward channels."""
EXPERTS = {
    "grpo_qwen3_30b_a3b_tp2_ep8.yaml": Moe(
        experts=128, chosen=8, ffn_hidden_size=768, scoring=Scoring.SOFTMAX
    ),
}


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_fits_its_model_and_ranks(file: str) -> None:
    world, (layers, heads, groups, ffn) = SHAPES[file]
    config = PolicyConfig.from_yaml(CONFIGS / file)
    model = shape(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        moe=EXPERTS.get(file),
    )
    topology = topology_of(config, world)
    assert topology.world_size == world
    check_layout(config, model, topology)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo: {}", "has no section `policy`"),
        ("policy: [1]", "has no section `policy`"),
        ("policy: {a: [", "is not valid YAML"),
        ("defaults: base.yaml\npolicy: {model_name: m}", "only the host resolves"),
        ("policy: {model_name: '${x.y}'}", "policy.model_name is an interpolation"),
        ("policy: {model_nam: m}", "did you mean 'model_name'"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        PolicyConfig.from_yaml(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere\.yaml"):
        PolicyConfig.from_yaml(tmp_path / "nowhere.yaml")
