"""Models of every family at the sizes in which they are published, with few layers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import Table, bind
from tests.fake_device.layouts import Layout
from tests.unit.published import COMMON, PUBLISHED
from tests.unit.published_experts import PUBLISHED_EXPERTS

WINDOW = 128
_LARGER: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "gemma2": {
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
    "gemma3_text": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window_pattern": 2,
    },
}
"""Of families whose smallest model is the published one here, too small for these layouts."""


_UNSPLIT_EXPERTS = {"gpt_oss"}
"""Their experts have biases, which Megatron-Core does not split over tensor-parallel ranks."""


_FURTHER: dict[str, dict[str, Any]] = {
    "apertus": {
        "architectures": ["ApertusForCausalLM"],
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "max_position_embeddings": 65536,
        "model_type": "apertus",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 3584,
        "moe_k": 8,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 0,
        "num_attention_heads": 64,
        "num_hidden_layers": 54,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 103424,
    },
}
"""The sizes of Apertus-8B and ERNIE-4.5-300B-A47B; all else is their class's default."""


def published() -> dict[str, dict[str, Any]]:
    """The config of the largest published model of each family, by the family's name."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for parameters, fields in (*PUBLISHED.values(), *PUBLISHED_EXPERTS.values()):
        family = fields["model_type"]
        if family not in found or parameters > found[family][0]:
            found[family] = parameters, fields
    known = {name: COMMON | each | _LARGER.get(name, {}) for name, (_, each) in found.items()}
    return known | {name: COMMON | each for name, each in _FURTHER.items()}


def with_layers(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with only so many layers: the last ones of what is listed for each layer, the
    first of which is dense if some are. Windows are narrower than the sweep's sequences.
    """
    before = fields["num_hidden_layers"]
    found = dict(fields, num_hidden_layers=layers)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == before:
            found[name] = value[-layers:]
    if fields.get("first_k_dense_replace"):
        found["first_k_dense_replace"] = 1
    if fields.get("sliding_window"):
        found["sliding_window"] = min(fields["sliding_window"], WINDOW)
    return found


def fitted(layout: Layout, fields: dict[str, Any]) -> Layout:
    """The layout with the widest axes that this model can be split over."""
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    tp = layout.tp
    while heads % tp or (groups % tp and tp % groups):
        tp //= 2
    etp = 1 if fields["model_type"] in _UNSPLIT_EXPERTS else min(layout.etp, tp)
    return layout.with_axes(tp=tp, ep=math.gcd(layout.ep, experts_of(fields)), etp=etp)


def experts_of(fields: dict[str, Any]) -> int:
    """How many experts a layer has; 1 in a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return next((fields[name] for name in names if name in fields), 1)


def written(fields: dict[str, Any], directory: Path) -> tuple[Path, Table, Architecture]:
    """The directory of a checkpoint without weights, and what its config says."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    table = bind(read_config(directory))
    return directory, table, table.architecture
