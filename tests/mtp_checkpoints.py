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
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def layer_name(config: dict[str, Any], number: int) -> str:
    """What the names of the tensors of layer `number` begin with, which counts from 0."""
    if config["model_type"] == "mimo":
        return f"model.mtp_layers.{number}."
    return f"model.layers.{config['num_hidden_layers'] + number}."


def own_names(config: dict[str, Any]) -> tuple[str, str, str, str]:
    """The family's names of `OWN`, in that order."""
    return MIMO if config["model_type"] == "mimo" else OWN


def add_mtp_layers(path: Path, layers: int = 1, copies: bool = True, seed: int = 1) -> Path:
    """Append random layers to a checkpoint in one file, named as its family's are, and count them
    in its config. With `copies` they repeat the embedding and the head, if the family's do.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((path / "config.json").read_text())
    ordinary, hidden = config["num_hidden_layers"], config["hidden_size"]
    random = torch.Generator().manual_seed(seed)
    last = f"model.layers.{ordinary - 1}."
    shapes = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    like, own = tensors[last + "input_layernorm.weight"], own_names(config)
    shapes |= dict.fromkeys(own, like) | {own[2]: like.new_empty(hidden, 2 * hidden)}
    for number in range(layers):
        for name, tensor in shapes.items():
            drawn = torch.randn(tensor.shape, generator=random) * 0.1
            if "norm" in name:
                drawn = 1.0 + drawn
            tensors[layer_name(config, number) + name] = drawn.to(tensor.dtype)
        if copies and own is OWN:
            for name, original in COPIES.items():
                original = original if original in tensors else "model.embed_tokens.weight"
                tensors[layer_name(config, number) + name] = tensors[original].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = layers
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path
