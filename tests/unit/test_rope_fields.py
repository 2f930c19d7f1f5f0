"""Where the rotary embedding stands in configs: in fields, or in sections, of either release."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.converters.architecture.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from tests.samples import LLAMA3
from tests.unit.test_family_configs import architecture, edited

SCALINGS: dict[str, tuple[dict[str, Any], Scaling | None]] = {
    "default": ({}, None),
    "llama3": (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    "linear": ({"factor": 2.0}, LinearScaling(2.0)),
    "dynamic": ({"factor": 2.0}, DynamicScaling(2.0, 128)),
    "yarn": (
        {"factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        YarnScaling(2.0, 64, 32.0, 1.0, True, 1.5),
    ),
    "longrope": (
        {"short_factor": [1.0, 1.5], "long_factor": [2.0, 2.5], "attention_factor": 1.5},
        LongScaling((1.0, 1.5), (2.0, 2.5), 128, 1.5),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("release", ["older", "oldest", "newer"])
def test_every_rope_scaling_of_either_release_is_read(
    tmp_path: Path, kind: str, release: str
) -> None:
    written, scaling = SCALINGS[kind]
    section = written | {"type" if release == "oldest" else "rope_type": kind}
    if release == "newer":
        fields = {"rope_theta": None, "rope_parameters": section | {"rope_theta": 5e5}}
    else:
        fields = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": section}
    assert architecture(edited(tmp_path, "llama", **fields)).mixer.rope == Rope(5e5, scaling)


def test_no_scaling_of_the_older_release_is_none(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", rope_parameters=None, rope_theta=5e5, rope_scaling=None)
    assert architecture(path).mixer.rope == Rope(5e5)


def test_gemma_3_has_a_rope_of_windowed_layers_in_either_release(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    newer = {
        "full_attention": {"rope_theta": 5e5} | linear,
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    older = {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": linear}
    removed: dict[str, Any] = dict.fromkeys(
        ("rope_parameters", "rope_theta", "rope_local_base_freq")
    )
    kinds = ["full_attention", "sliding_attention"]
    removed |= {"num_hidden_layers": 2, "layer_types": kinds}
    for name, fields in {"newer": {"rope_parameters": newer}, "older": older}.items():
        path = edited(tmp_path / name, "gemma3_text", head_dim=8, **removed | fields)
        read = architecture(path)
        ropes = [layer.mixer.rope for layer in read.layers]
        assert ropes == [Rope(5e5, LinearScaling(8.0)), Rope(5e3)]


def test_phi_3_writes_the_length_before_scaling_outside_of_the_section(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    path = edited(
        tmp_path,
        "phi3",
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "longrope"} | factors,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.5,
        pad_token_id=None,
    )
    factor = math.sqrt(1 + math.log(128 / 32) / math.log(32))
    scaling = LongScaling((1.0,), (2.0,), 32, pytest.approx(factor))
    assert architecture(path).mixer.rope == Rope(1e4, scaling, fraction=0.5)
