"""Recognises quantised checkpoints, to say what they are and how to get plain weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}


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
    return f"quantised weights cannot be converted; use the unquantised checkpoint, or {how}"


def refusal(section: Any) -> str:
    """Why a config with this `quantization_config` is refused, and what to do."""
    method = section.get("quant_method", "") if isinstance(section, Mapping) else ""
    return f"the checkpoint is quantised to {named(section)}; {advice(str(method))}"


@dataclass(frozen=True)
class Quantisation:
    """A quantisation seen in a checkpoint's tensors: what it is, and what to do about it."""

    what: str
    advice: str


def found_in(unknown: Collection[str], dtypes: Mapping[str, torch.dtype]) -> Quantisation | None:
    """The quantisation that a checkpoint's tensors show, if any.

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
    return Quantisation(what + extra, advice(kind.split(" ")[0]))
