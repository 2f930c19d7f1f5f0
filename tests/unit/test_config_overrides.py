"""Fields that a configuration puts in the place of those of a model's config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config

from megatron_policy.converters.hf_config import read_config
from megatron_policy.converters.rotary import YarnScaling
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConversionError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "truncate": True,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1,
    "mscale_all_dim": 0,
}
"""As NeMo RL's own configurations write it."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_field_that_is_overridden_counts_and_the_others_stay(model: Path) -> None:
    plain = bind(read_config(model)).architecture
    found = bind(read_config(model, {"rms_norm_eps": 1e-3})).architecture
    assert (plain.layernorm_epsilon, found.layernorm_epsilon) == (1e-6, 1e-3)
    assert found.hidden_size == plain.hidden_size == 64
    assert bind(read_config(model, {})).architecture == plain


def test_a_scaled_rotary_embedding_is_overridden_as_the_host_writes_it(model: Path) -> None:
    overrides = {"rope_scaling": YARN, "max_position_embeddings": 128}
    rope = bind(read_config(model, overrides)).architecture.rope
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.base, rope.scaling.factor) == (1e6, 2.0)


def test_an_overridden_field_that_no_such_model_has_is_refused(model: Path) -> None:
    with pytest.raises(ConversionError, match=r"rms_norm_epsilon = 0\.1: unknown field"):
        bind(read_config(model, {"rms_norm_epsilon": 0.1}))
