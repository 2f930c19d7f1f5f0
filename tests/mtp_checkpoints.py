"""Gives tiny checkpoints the layers for multi-token prediction that published ones have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import SAMPLES

NUMBERED = [
    family
    for family, samples in SAMPLES.items()
    if "num_nextn_predict_layers" in samples.full and family != "nemotron_h"
]
"""Families whose checkpoints can have several such layers."""
ONE_AT_MOST = ("nemotron_h", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")
"""Those whose checkpoints have one, under names that do not go on from the ordinary layers'."""
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What such a layer has besides the weights of an ordinary layer and the two copies."""
MIMO = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight")
MIMO += ("final_layernorm.weight",)
"""The same in MiMo, which has no copies."""
QWEN = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
"""The same in Qwen3-Next and Qwen3.5, which have one such layer and no copies."""
NEMOTRON = ("layers.0.enorm.weight", "layers.0.hnorm.weight", "layers.0.eh_proj.weight")
NEMOTRON += ("layers.1.final_layernorm.weight",)
"""The same in Nemotron 3, of whose one such layer attention and experts are numbered apart."""
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def is_qwen(config: dict[str, Any]) -> bool:
    """Whether its one such layer is not counted, and named apart from others."""
    return str(config["model_type"]).startswith("qwen3_")


def is_nemotron(config: dict[str, Any]) -> bool:
    """Whether its layers have one part each."""
    return bool(config["model_type"] == "nemotron_h")


def count_layers(config: dict[str, Any]) -> int:
    """How many such layers the checkpoint has."""
    return 1 if is_qwen(config) else int(config["num_nextn_predict_layers"])


def count_ordinary(config: dict[str, Any]) -> int:
    """How many other layers it has."""
    kinds = config.get("layers_block_type")
    return int(config["num_hidden_layers"]) if kinds is None else len(kinds)


def ordinary_name(config: dict[str, Any], number: int) -> str:
    """What the names of the tensors of an ordinary layer begin with."""
    return f"{'backbone' if is_nemotron(config) else 'model'}.layers.{number}."


def layer_name(config: dict[str, Any], number: int) -> str:
    """What the names of the tensors of layer `number` begin with, which counts from 0."""
    if is_qwen(config) or is_nemotron(config):
        return "mtp."
    if config["model_type"] == "mimo":
        return f"model.mtp_layers.{number}."
    return ordinary_name(config, count_ordinary(config) + number)


def decoder_names(config: dict[str, Any], number: int) -> dict[str, int]:
    """The same of its tensors that ordinary layers have too, with the number of an ordinary layer
    that is like it: of one, or of one with attention and one with experts.
    """
    if is_nemotron(config):
        kinds = enumerate(("full_attention", "moe"))
        return {f"mtp.layers.{n}.": config["layers_block_type"].index(kind) for n, kind in kinds}
    start = layer_name(config, number) + "layers.0." * is_qwen(config)
    return {start: count_ordinary(config) - 1}


def own_names(config: dict[str, Any]) -> tuple[str, str, str, str]:
    """The family's names of `OWN`, in that order."""
    if is_qwen(config):
        return QWEN
    return {"mimo": MIMO, "nemotron_h": NEMOTRON}.get(config["model_type"], OWN)


def add_mtp_layers(path: Path, layers: int = 1, copies: bool = True, seed: int = 1) -> Path:
    """Append random layers to a checkpoint in one file, named as its family's are, and count them
    in its config, if the family's do. With `copies` they repeat the embedding and the head, as some
    families' do.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((path / "config.json").read_text())
    hidden, own = config["hidden_size"], own_names(config)
    random = torch.Generator().manual_seed(seed)
    like = next(tensor for name, tensor in tensors.items() if name.endswith("norm.weight"))
    further = dict.fromkeys(own, like.new_empty(hidden)) | {
        own[2]: like.new_empty(hidden, 2 * hidden)
    }
    for number in range(layers):
        drawn_of = {}
        for start, ordinary in decoder_names(config, number).items():
            alike = ordinary_name(config, ordinary)
            drawn_of |= {
                n.replace(alike, start): t for n, t in tensors.items() if n.startswith(alike)
            }
        drawn_of |= {layer_name(config, number) + name: t for name, t in further.items()}
        for name, tensor in drawn_of.items():
            drawn = torch.randn(tensor.shape, generator=random) * 0.1
            if "norm" in name:
                drawn = 1.0 + drawn
            tensors[name] = drawn.to(tensor.dtype)
        if copies and own is OWN:
            for name, original in COPIES.items():
                original = original if original in tensors else "model.embed_tokens.weight"
                tensors[layer_name(config, number) + name] = tensors[original].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    if not is_qwen(config):
        config["num_nextn_predict_layers"] = layers
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path
