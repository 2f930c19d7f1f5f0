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
from tests.families import COMMON, PUBLISHED, SAMPLES
from tests.hybrid_sizes import HYBRIDS
from tests.samples import Samples

WINDOW = 128


def published() -> dict[str, dict[str, Any]]:
    """The config of the largest published model of each family, by the family's name, or of one
    that is larger: sizes alone are enough, all else is the default of its class.
    """
    found: dict[str, dict[str, Any]] = {}
    for _, fields in sorted((PUBLISHED | HYBRIDS).values(), key=lambda each: each[0]):
        found[fields["model_type"]] = fields
    for family, samples in SAMPLES.items():
        named = {"model_type": family, "architectures": [samples.architecture]}
        known = found.get(family, {})
        if "text_config" in known:
            found[family] = known | {"text_config": known["text_config"] | samples.larger}
        else:
            found[family] = COMMON | named | known | samples.larger
    return found


def decoder_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model's decoder."""
    section: dict[str, Any] = fields.get("text_config", fields)
    return section


def with_layers(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with only so many layers: the last ones of what is listed for each layer, the
    first of which is dense if some are. Where kinds of layers take turns, so they do here, with a
    layer of each at least. Windows are narrower than the sweep's sequences.
    """
    samples = SAMPLES[fields["model_type"]]
    if "text_config" in fields:
        tower = fields["vision_config"]
        tower = tower | {n: 2 for n in ("depth", "num_hidden_layers") if n in tower}
        deep = {"deepstack_visual_indexes": [1]} if tower.get("deepstack_visual_indexes") else {}
        text = _with_layers(decoder_of(fields), layers, samples)
        if "audio_config" in fields:
            ears = fields["audio_config"]
            few = {n: 2 for n in ("encoder_layers", "num_hidden_layers") if n in ears}
            fields = fields | {"audio_config": ears | few}
        return fields | {"vision_config": tower | deep, "text_config": text}
    return _with_layers(fields, layers, samples)


def _with_layers(fields: dict[str, Any], layers: int, samples: Samples) -> dict[str, Any]:
    before = fields["num_hidden_layers"]
    layers = max([layers, *map(len, samples.turns.values())])
    found = dict(fields, num_hidden_layers=layers)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == before:
            found[name] = value[-layers:]
    found |= samples.take_turns(layers)
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if fields.get(name):
            found[name] = 1
    if fields.get("sliding_window"):
        found["sliding_window"] = min(fields["sliding_window"], WINDOW)
    return found


def fitted(layout: Layout, fields: dict[str, Any]) -> Layout:
    """The layout with the widest axes that this model can be split over."""
    sizes = decoder_of(fields)
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    of_states = (sizes.get(name, 0) for name in ("linear_num_value_heads", "mamba_n_heads"))
    tp, values = layout.tp, math.gcd(*of_states)
    while heads % tp or (groups % tp and tp % groups) or values % (tp * layout.cp):
        tp //= 2
    etp = 1 if SAMPLES[fields["model_type"]].expert_biases else min(layout.etp, tp)
    return layout.with_axes(tp=tp, ep=math.gcd(layout.ep, experts_of(fields)), etp=etp)


def experts_of(fields: dict[str, Any]) -> int:
    """How many experts a layer has; 1 in a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    sizes = decoder_of(fields)
    return next((sizes[name] for name in names if name in sizes), 1)


def written(fields: dict[str, Any], directory: Path) -> tuple[Path, Table, Architecture]:
    """The directory of a checkpoint without weights, and what its config says."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    table = bind(read_config(directory))
    return directory, table, table.architecture
