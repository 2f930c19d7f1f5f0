"""Tiny quantised checkpoints by a quantiser of the tests, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_STACKED = ("gate_up_proj", "down_proj")


def to_fp8(weight_MK: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The payload and the scales of a matrix; blocks at its lower and right edges are cut."""
    rows, columns = (-(-n // each) for n, each in zip(weight_MK.shape, block, strict=True))
    payload = torch.empty(weight_MK.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            part = weight_MK[at].float()
            scales[row, column] = part.abs().max().clamp(min=1e-8) / 448
            payload[at] = (part / scales[row, column]).to(torch.float8_e4m3fn)
    return payload, scales


def to_mxfp4(weight_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks `[E, N, K / 32, 16]` and the scales `[E, N, K / 32]` of stacked weights."""
    values = weight_EKN.float().mT.unflatten(-1, (-1, 32))
    exponents = values.abs().amax(-1).clamp(min=1e-30).div(6).log2().ceil().clamp(-120, 120)
    scaled = values / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _FP4).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(-1, (16, 2))
    blocks = pairs[..., 0] | (pairs[..., 1] << 4)
    return blocks.contiguous(), (exponents + 127).to(torch.uint8)


def quantise_fp8(
    source: Path, target: Path, block: tuple[int, int] = (16, 16), **section: Any
) -> Path:
    """Write a copy with the matrices of all layers but routers in fp8, as their makers do."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            inner = name.startswith("model.layers.") and tensors[name].ndim == 2
            if inner and ".gate.weight" not in name:
                tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensors[name], block)

    said = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
    return edited(source, target, change, {"quantization_config": said | section})


def quantise_mxfp4(source: Path, target: Path) -> Path:
    """Write a copy of a gpt-oss checkpoint with its experts in mxfp4."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith(_STACKED):
                blocks, scales = to_mxfp4(tensors.pop(name))
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": [*left, "lm_head"]}
    return edited(source, target, change, {"quantization_config": section})


def edited(
    source: Path,
    target: Path,
    change: Callable[[Tensors], None] = lambda tensors: None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a copy with changed tensors and fields of the config; a None leaves a field out."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
    config = json.loads((target / "config.json").read_text()) | dict(fields or {})
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def dequantised_by_transformers(path: Path) -> Tensors:
    """All tensors of a checkpoint as transformers dequantises them, under their plain names."""
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    stored = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
    found: Tensors = {}
    for name, tensor in stored.items():
        if f"{name}_scale_inv" in stored:
            scales, block = stored[f"{name}_scale_inv"], section["weight_block_size"]
            found[name] = fp8_by_transformers(tensor, scales, block)
        elif name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            found[plain] = mxfp4_by_transformers(tensor, stored[f"{plain}_scales"])
        elif not name.endswith(("_scale_inv", "_scales")):
            found[name] = tensor
    return found


def fp8_by_transformers(payload_MK: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """What transformers makes of a matrix. It refuses cut blocks, or takes smaller blocks that fit:
    here they are filled with zeros before, and cut after.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = payload_MK.shape
    whole = torch.zeros(scales.shape[0] * block[0], scales.shape[1] * block[1])
    whole = whole.to(torch.float8_e4m3fn)
    whole[:rows, :columns] = payload_MK
    made = Fp8Dequantize(None)._dequantize_one(whole, scales, output_dtype=torch.bfloat16)
    return made[:rows, :columns].contiguous()


def mxfp4_by_transformers(blocks: Tensor, scales: Tensor) -> Tensor:
    """What transformers makes of stacked experts: bfloat16 `[E, K, N]`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)
