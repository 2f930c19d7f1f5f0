"""Gives tiny checkpoints the layers for multi-token prediction that published ones have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What such a layer has besides the weights of an ordinary layer and the two copies."""
MIMO = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight")
MIMO += ("final_layernorm.weight",)
"""The same in MiMo, which has no copies."""
QWEN = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
"""The same in Qwen3-Next and Qwen3.5, which have one such layer and no copies."""
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def is_qwen(config: dict[str, Any]) -> bool:
    """Whether its one such layer is not counted, and named apart from others."""
    return str(config["model_type"]).startswith("qwen3_")


def count_layers(config: dict[str, Any]) -> int:
    """How many such layers the checkpoint has."""
    return 1 if is_qwen(config) else int(config["num_nextn_predict_layers"])


def layer_name(config: dict[str, Any], number: int) -> str:
    """What the names of the tensors of layer `number` begin with, which counts from 0."""
    if is_qwen(config):
        return "mtp."
    if config["model_type"] == "mimo":
        return f"model.mtp_layers.{number}."
    return f"model.layers.{config['num_hidden_layers'] + number}."


def decoder_name(config: dict[str, Any], number: int) -> str:
    """The same of its tensors that an ordinary layer has too."""
    return layer_name(config, number) + "layers.0." * is_qwen(config)


def own_names(config: dict[str, Any]) -> tuple[str, str, str, str]:
    """The family's names of `OWN`, in that order."""
    if is_qwen(config):
        return QWEN
    return MIMO if config["model_type"] == "mimo" else OWN


def add_mtp_layers(path: Path, layers: int = 1, copies: bool = True, seed: int = 1) -> Path:
    """Append random layers to a checkpoint in one file, named as its family's are, and count them
    in its config, if the family's do. With `copies` they repeat the embedding and the head, as some
    families' do.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((path / "config.json").read_text())
    ordinary, hidden = config["num_hidden_layers"], config["hidden_size"]
    random = torch.Generator().manual_seed(seed)
    last = f"model.layers.{ordinary - 1}."
    shapes = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    like, own = tensors[last + "input_layernorm.weight"], own_names(config)
    further = dict.fromkeys(own, like) | {own[2]: like.new_empty(hidden, 2 * hidden)}
    for number in range(layers):
        drawn_of = {decoder_name(config, number) + name: t for name, t in shapes.items()}
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
