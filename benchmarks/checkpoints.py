"""Writes random Qwen2 and Qwen3-MoE checkpoints of any size, quickly: only tensors, without a
model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.converters.formats.hf_writing import write_shard
from megatron_policy.converters.table import bind


@dataclass(frozen=True)
class Size:
    """The dimensions that make a Qwen2 model large, or with `experts` in each layer a Qwen3-MoE
    one, whose experts have `ffn` channels; all are of `dtype`, in one file.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int
    vocab: int
    tied: bool = True
    experts: int = 0
    dtype: str = "bfloat16"


HALF_BILLION = Size(hidden=896, ffn=4864, layers=24, heads=14, groups=2, vocab=151936)
ONE_AND_A_HALF_BILLION = Size(hidden=1536, ffn=8960, layers=28, heads=12, groups=2, vocab=151936)
BLOCK = 128
"""Rows and columns that share a scale, as published."""
SIZES = {"0.5B": HALF_BILLION, "1.5B": ONE_AND_A_HALF_BILLION}
LARGER = {
    "3B": Size(hidden=2048, ffn=11008, layers=36, heads=16, groups=2, vocab=151936),
    "7B": Size(hidden=3584, ffn=18944, layers=28, heads=28, groups=4, vocab=152064, tied=False),
    "14B": Size(hidden=5120, ffn=13824, layers=48, heads=40, groups=8, vocab=152064, tied=False),
    "32B": Size(hidden=5120, ffn=27648, layers=64, heads=40, groups=8, vocab=152064, tied=False),
}
"""The shapes of Qwen2.5's other models."""


CHOSEN = 4
"""Experts of a token."""
MANY_EXPERTS = Size(hidden=128, ffn=64, layers=48, heads=4, groups=2, vocab=1024, experts=128)
"""As many tensors as a real model has, each of few weights."""


def narrow(layers: int) -> Size:
    """Few weights in many tensors: time depends on the number of tensors, not on bytes."""
    return Size(hidden=128, ffn=256, layers=layers, heads=4, groups=2, vocab=1024)


def write_config(path: Path, size: Size) -> Path:
    """Write config.json into the new folder `path`; return `path`."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_config(size)), encoding="utf-8")
    return path


def write_checkpoint(path: Path, size: Size, alike: bool = False) -> Path:
    """Write config.json and model.safetensors into the new folder `path`; return `path`. With
    `alike` tensors of one shape have the same values, which is quicker to write.
    """
    return write_model(path, _config(size), alike)


def write_model(path: Path, config: Mapping[str, Any], alike: bool = False) -> Path:
    """The same for any config.json, whose `torch_dtype` tensors have."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = bind(read_config(path)).hf_shapes()
    dtype = getattr(torch, config["torch_dtype"])
    inventory = {name: (dtype, shape) for name, shape in shapes.items()}
    write_shard(path, SINGLE, inventory, _random_tensors(shapes, dtype, alike))
    return path


def write_quantised(path: Path, size: Size) -> Path:
    """The same with the matrices of all layers in fp8, with scales of blocks of 128 x 128."""
    path.mkdir()
    section = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = _config(size) | {"quantization_config": section}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = bind(read_config(path)).hf_shapes()
    inventory: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        quantised = len(shape) == 2 and name.startswith("model.layers.")
        inventory[name] = (torch.float8_e4m3fn if quantised else torch.bfloat16, shape)
        if quantised:
            blocks = tuple(-(-length // BLOCK) for length in shape)
            inventory[f"{name}_scale_inv"] = (torch.float32, blocks)
    write_shard(path, SINGLE, inventory, _quantised_tensors(inventory))
    return path


def _quantised_tensors(
    inventory: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, (dtype, shape) in inventory.items():
        normal = torch.empty(shape).normal_(generator=generator)
        if name.endswith("_scale_inv"):
            yield name, normal.exp() * 1e-4
        else:
            yield name, (normal * (100 if dtype == torch.float8_e4m3fn else 0.02)).to(dtype)


def _config(size: Size) -> dict[str, object]:
    kind: dict[str, object] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    if size.experts:
        kind = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": size.hidden // size.heads,
            "moe_intermediate_size": size.ffn,
            "num_experts": size.experts,
            "num_experts_per_tok": min(CHOSEN, size.experts),
            "norm_topk_prob": True,
        }
    return kind | {
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "vocab_size": size.vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": size.tied,
        "torch_dtype": size.dtype,
    }


def _random_tensors(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, alike: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = drawn.get(shape)
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype)
            tensor.normal_(0.0, 0.02, generator=generator)
        if alike:
            drawn[shape] = tensor
        yield name, tensor + 1 if "norm" in name else tensor
