"""Recognises quantised checkpoints: which of them are read, and what to do with the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SECTION = "quantization_config"
"""The field of config.json that says how weights are quantised."""

READ_AS = "the quantised weights are read as bfloat16"

FP8, MXFP4 = "fp8", "mxfp4"

_FP8 = {
    torch.float8_e4m3fn: "fp8 (e4m3)",
    torch.float8_e5m2: "fp8 (e5m2)",
}

# Suffixes of tensors that accompany quantised weights, and the method that uses them.
_COMPANIONS = {
    ".weight_scale_inv": "fp8 with block scales (weight_scale_inv)",
    "_scale_inv": "fp8 with block scales (scale_inv)",
    ".qweight": "gptq or awq (qweight)",
    ".weight_packed": "compressed-tensors (weight_packed)",
    "_blocks": "mxfp4 (blocks and scales)",
    ".weight.absmax": "bitsandbytes (absmax)",
    ".weight_scale": "scaled weights (weight_scale)",
}

# The transformers config that dequantises while loading, if there is one.
_DEQUANTISERS = {
    FP8: "FineGrainedFP8Config(dequantize=True)",
    MXFP4: "Mxfp4Config(dequantize=True)",
}

# Fields of a section that is read, and the values of each that are; None stands for any. The
# dtypes of the tensors say which of them are quantised, so lists of modules add nothing to that.
_MODULES: Mapping[str, tuple[object, ...] | None] = dict.fromkeys(
    ("quant_method", "modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize")
)
_FIELDS: Mapping[str, Mapping[str, tuple[object, ...] | None]] = {
    FP8: {
        **_MODULES,
        "activation_scheme": ("dynamic",),
        "expert_dtype": ("fp8",),
        "fmt": ("e4m3", "e4m3fn", "float8_e4m3fn"),
        "scale_fmt": ("float", "ue8m0"),
        "weight_block_size": None,
    },
    MXFP4: _MODULES,
}


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are quantised: `method` is FP8 or MXFP4.

    `block` is the rows and columns of a weight that share one scale.
    """

    method: str
    block: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.method} in blocks of {self.block[0]} x {self.block[1]}"


def scheme_of(section: object) -> Scheme | None:
    """The scheme of a config's `quantization_config`; None if there is none that is read."""
    if not isinstance(section, Mapping) or _obstacle(section):
        return None
    if section["quant_method"] == MXFP4:
        return Scheme(MXFP4, (1, 32))
    rows, columns = section["weight_block_size"]
    return Scheme(FP8, (rows, columns))


def _obstacle(section: Mapping[str, Any]) -> str:
    """Why weights with this `quantization_config` are not read; "" if they are."""
    known = _FIELDS.get(str(section.get("quant_method")))
    if known is None:
        return "quantised weights of this method cannot be converted"
    for name, value in section.items():
        if name not in known:
            return f"its field {name} = {value!r:.60} is not known"
        legal = known[name]
        if legal is not None and value is not None and value not in legal:
            return f"its {name} is {value!r:.60}, and only {' or '.join(map(repr, legal))} is read"
    if section["quant_method"] == FP8:
        block = section.get("weight_block_size")
        sizes = block if isinstance(block, (list, tuple)) else ()
        if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
            return f"its weight_block_size is {block!r:.60}, and only two positive sizes are read"
    return ""


def named(section: object) -> str:
    """A config's `quantization_config` in a few words, such as "fp8 (e4m3, blocks 128 x 128)"."""
    if not isinstance(section, Mapping):
        return repr(section)
    method = section.get("quant_method") or section.get("quant_type") or "an unnamed method"
    traits = [str(section[key]) for key in ("fmt", "format") if section.get(key)]
    traits += [f"{section['bits']} bits"] if section.get("bits") else []
    block = section.get("weight_block_size")
    traits += ["blocks " + " x ".join(map(str, block))] if isinstance(block, (list, tuple)) else []
    return f"{method} ({', '.join(traits)})" if traits else str(method)


def advice(method: str) -> str:
    """What to do with a checkpoint quantised by `method`, as `quant_method` names it."""
    config = _DEQUANTISERS.get(method)
    how = (
        f"load it in transformers with quantization_config={config} and save_pretrained the result"
        if config
        else "dequantise it with the tool that made it"
    )
    return f"use the unquantised checkpoint, or {how}"


def refusal(section: Any) -> str:
    """Why a config with this `quantization_config` is refused, and what to do."""
    mapping = section if isinstance(section, Mapping) else {}
    what = f"the checkpoint is quantised to {named(section)}"
    return f"{what}; {_obstacle(mapping)}; {advice(str(mapping.get('quant_method', '')))}"


@dataclass(frozen=True)
class Quantisation:
    """A quantisation seen in a checkpoint's tensors: what it is, and what to do about it."""

    what: str
    advice: str


def found_in(unknown: Collection[str], dtypes: Mapping[str, torch.dtype]) -> Quantisation | None:
    """The quantisation that a checkpoint's tensors show, if any, and that was not read.

    `unknown` are the names that no row uses, `dtypes` those of all tensors.
    """
    low = [name for name, dtype in dtypes.items() if dtype in _FP8]
    if low:
        scales = [name for name in dtypes if name.endswith("_scale_inv")]
        extra = f", with block scales in {len(scales)}, the first {scales[0]}" if scales else ""
        return _found(_FP8[dtypes[low[0]]], low, extra)
    for suffix, kind in _COMPANIONS.items():
        if companions := [name for name in unknown if name.endswith(suffix)]:
            return _found(kind, companions)
    return None


def _found(kind: str, names: Sequence[str], extra: str = "") -> Quantisation:
    what = f"the checkpoint is quantised to {kind}: {len(names)} tensors, the first {names[0]}"
    method = kind.split(" ")[0]
    restore = (
        f"config.json lacks the {SECTION} that says how to read them: put it back as published; or "
        if method in _FIELDS
        else "quantised weights of this method cannot be converted; "
    )
    return Quantisation(what + extra, restore + advice(method))
