"""The floor for imports and exports: each weight copied once, between Megatron-Core's layout and
that of Hugging Face.

Straight-line code for Qwen2 on one rank: no modules, no checks, nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_BLOCK = 128  # rows and columns of an fp8 weight that share a scale
# A look-up takes a fraction of the time of torch's cast.
_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_COPIED = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def copy_weights(file: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights with Megatron-Core's names and layout, in memory never touched before.

    Weights in fp8, with scales of blocks, are read as bf16.
    Shapes are a view away from those of its parameters: for a fused attention input `[G, N / G +
    2, H, ...]` (groups, heads of a group, head dim), for a fused MLP input `[2, F, D]`.
    """
    made: dict[str, torch.Tensor] = {}
    with safe_open(file, framework="pt") as source:
        read = partial(_read, source, set(source.keys()))
        made["embedding.word_embeddings.weight"] = _copy(read("model.embed_tokens.weight"))
        for layer in range(config["num_hidden_layers"]):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            for kind in ("weight", "bias"):
                q, k, v = (read(f"{theirs}self_attn.{name}_proj.{kind}") for name in "qkv")
                made[f"{ours}self_attention.linear_qkv.{kind}"] = _fuse_heads(q, k, v, config)
            gate, up = read(f"{theirs}mlp.gate_proj.weight"), read(f"{theirs}mlp.up_proj.weight")
            fused = torch.empty((2, *gate.shape), dtype=gate.dtype)
            fused[0].copy_(gate)
            fused[1].copy_(up)
            made[f"{ours}mlp.linear_fc1.weight"] = fused
            for mine, name in _COPIED.items():
                made[ours + mine] = _copy(read(theirs + name))
        made["decoder.final_layernorm.weight"] = _copy(read("model.norm.weight"))
    return made


def hf_views(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors as views of weights with Megatron-Core's names and layout.

    Each has the elements of its HF tensor in their order, in a shape that is a view away.
    """
    groups = config["num_key_value_heads"]
    per_group = config["num_attention_heads"] // groups
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    yield "model.embed_tokens.weight", weights["embedding.word_embeddings.weight"]
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            fused = weights[f"{ours}self_attention.linear_qkv.{kind}"]
            heads = fused.view(groups, per_group + 2, head_dim, *fused.shape[1:])
            yield f"{theirs}self_attn.q_proj.{kind}", heads[:, :per_group]
            yield f"{theirs}self_attn.k_proj.{kind}", heads[:, per_group]
            yield f"{theirs}self_attn.v_proj.{kind}", heads[:, per_group + 1]
        gate, up = weights[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        yield f"{theirs}mlp.gate_proj.weight", gate
        yield f"{theirs}mlp.up_proj.weight", up
        for mine, name in _COPIED.items():
            yield theirs + name, weights[ours + mine]
    yield "model.norm.weight", weights["decoder.final_layernorm.weight"]


def _read(source: Any, names: set[str], name: str) -> torch.Tensor:
    """A tensor of the file; one in fp8 is dequantised to bf16, one row of blocks after another."""
    tensor = source.get_tensor(name)
    if f"{name}_scale_inv" not in names:
        return tensor
    made = torch.empty(tensor.shape, dtype=torch.bfloat16)
    for first, scales in zip(
        range(0, len(tensor), _BLOCK), source.get_tensor(f"{name}_scale_inv"), strict=True
    ):
        part = tensor[first : first + _BLOCK].view(torch.uint8)
        numbers = torch.index_select(_NUMBERS, 0, part.reshape(-1).to(torch.int32))
        numbers = numbers.view(part.shape).mul_(scales.repeat_interleave(_BLOCK)[: part.shape[1]])
        made[first : first + _BLOCK].copy_(numbers)
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _fuse_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: Mapping[str, Any]
) -> torch.Tensor:
    groups = config["num_key_value_heads"]
    per_group = config["num_attention_heads"] // groups
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    tail = q.shape[1:]
    fused = torch.empty((groups, per_group + 2, head_dim, *tail), dtype=q.dtype)
    fused[:, :per_group].copy_(q.view(groups, per_group, head_dim, *tail))
    fused[:, per_group].copy_(k.view(groups, head_dim, *tail))
    fused[:, per_group + 1].copy_(v.view(groups, head_dim, *tail))
    return fused
