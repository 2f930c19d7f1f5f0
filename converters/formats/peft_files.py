"""The directory of an adapter as Hugging Face PEFT writes and reads it: `adapter_config.json` and
`adapter_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_policy.converters.adapters import PREFIX, A
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.contained import expanded, inside, read
from megatron_policy.converters.files.publishing import new_directories, write_file
from megatron_policy.errors import ConfigError, ConversionError

from .safetensors_format import encode

ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE = "megatron_policy_base.json"
"""Which base the adapters were trained on, by its digest; PEFT does not read it."""
_MAX_BYTES = 2**20

_IN_FULL = "modules_to_save"
_INNER = ".base_layer"
"""What PEFT calls a module of which it adapts two tensors, within its adapter of the second."""
_HEADS = ("classifier", "score")
"""Names under which PEFT looks for a scalar head; models of transformers call it the latter."""

_MERGE = (
    "merge them into their base, as PEFT's merge_and_unload() does, and set policy.model_name to "
    "that"
)

_PLAIN = {
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "lora_bias": False,
    _IN_FULL: None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
}
"""Settings of PEFT with which adapters are `W + lora_alpha / r * B A` on linear layers, and no
more.
"""


_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw the first values that leave the base as it is."""


def holds_adapters(path: str | Path) -> bool:
    """Whether it is a directory of adapters, and not of a whole model."""
    return (expanded(path) / ADAPTER_CONFIG).is_file()


def check_peft_config(
    root: Path,
    rank: int | None,
    alpha: float | None,
    base: str,
    *,
    scalar_head: bool = False,
    parameters: Collection[str] = (),
) -> bool:
    """ConfigError unless `root` has adapters of this rank and alpha, for the base of the digest
    `base` as far as it says for which; ConversionError for files that are damaged, or whose
    adapters are of another kind.

    Returns whether it also has modules that are trained in full, which only a model with a
    `scalar_head` can have: that head. `parameters` are the tensors with stacked experts that the
    adapters have to be of.
    """
    if not (root / ADAPTER_CONFIG).is_file() or not (root / ADAPTER_MODEL).is_file():
        raise ConfigError(
            f"{root} has no {ADAPTER_CONFIG} and {ADAPTER_MODEL}: give a directory that PEFT's "
            "save_pretrained or export_peft wrote"
        )
    config = _json(root, ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ConversionError(f"{root} has {config.get('peft_type')!r} adapters, not 'LORA'")
    in_full = config.get(_IN_FULL) or []
    _check_parameters(root, config.get("target_parameters") or [], parameters)
    for name, plain in _PLAIN.items():
        if (found := config.get(name)) not in (plain, None, [], {}, False):
            if name == _IN_FULL and scalar_head and _are_heads(found):
                continue
            raise ConversionError(
                f"{root} has adapters with {name}={found!r:.80}, which is not supported: {_MERGE}"
            )
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise ConversionError(
            f"{root} has adapters with init_lora_weights={start!r:.40}, which changes the base: "
            "save them with path_initial_model_for_weight_conversion first"
        )
    for name, own, key in (("r", rank, "dim"), ("lora_alpha", alpha, "alpha")):
        if config.get(name) != own:
            raise ConfigError(
                f"policy.megatron_cfg.peft.{key} is {own}, but the adapters in {root} have "
                f"{name}={config.get(name)!r:.40}: set it to that"
            )
    of = _json(root, BASE) if (root / BASE).is_file() else {"digest": base}
    if (other := of.get("digest")) != base:
        raise ConfigError(
            f"the adapters in {root} were trained on {of.get('model')!r:.200}, which has other "
            f"weights than policy.model_name, or other hf_config_overrides (digest {other!r:.40}, "
            f"not {base!r}): set policy.model_name and these to what they were trained on"
        )
    return bool(in_full)


def _check_parameters(root: Path, found: object, parameters: Collection[str]) -> None:
    """ConfigError unless what PEFT finds by these names or ends of names is `parameters`."""
    names = [str(each) for each in found] if isinstance(found, list) else [str(found)]
    patterns = {name: {p for p in parameters if f".{p}".endswith(f".{name}")} for name in names}
    missing = sorted(set(parameters).difference(*patterns.values()))
    unknown = [name for name, fitting in patterns.items() if not fitting]
    if missing or unknown:
        what = f"no adapters of {missing[0]}" if missing else f"adapters of {unknown[0]!r:.200}"
        raise ConfigError(
            f"{root} has {what}, unlike policy.megatron_cfg.peft: set target_modules to the "
            f"modules that it adapts, or {_MERGE}"
        )


def _are_heads(modules: object) -> bool:
    return isinstance(modules, list) and all(each in _HEADS for each in modules)


def write_peft(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    model: str,
    base: str,
    overwrite: bool,
    parameters: Collection[str] = (),
) -> None:
    """Write adapters, by PEFT's names, as a directory that appears when it is complete.

    Tensors of a scalar head, which is trained in full, are among them. `parameters` are the adapted
    tensors with stacked experts, whose adapters have no dropout in PEFT. `model` is the base's
    name, `base` its digest. ConfigError if the directory exists, unless `overwrite`.
    """
    stacks = {name.rpartition(".")[0] for name in parameters}
    head = [name.removeprefix(PREFIX) for name in tensors if ".lora_" not in name]
    per_token = any(name.endswith(".bias") for name in head)
    config = {
        "peft_type": "LORA",
        "task_type": ("TOKEN_CLS" if per_token else "SEQ_CLS") if head else "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if parameters else dropout,
        "target_modules": [
            name for name in target_modules(tensors) if name.removesuffix(_INNER) not in stacks
        ],
        "target_parameters": sorted(parameters) or None,
        _IN_FULL: sorted({name.rpartition(".")[0] for name in head}) or None,
        "inference_mode": True,
        **{name: _PLAIN[name] for name in ("bias", "fan_in_fan_out", "use_rslora", "use_dora")},
    }
    header, extents = encode({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    order = sorted(extents, key=lambda name: extents[name].start)
    content = b"".join([header, *(_bytes(tensors[name]) for name in order)])
    with new_directories([path], overwrite) as (partial,):
        write_file(partial / ADAPTER_MODEL, content)
        write_file(partial / ADAPTER_CONFIG, strict_json.encoded(config, indent=2))
        of = {"model": model, "digest": base}
        write_file(partial / BASE, strict_json.encoded(of, indent=2))


def target_modules(names: Iterable[str]) -> list[str]:
    """The modules that adapters of these names adapt, by their whole paths: PEFT then adapts no
    others.
    """
    modules = [name.removeprefix(PREFIX).removesuffix(A) for name in names if name.endswith(A)]
    return sorted(modules)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _json(root: Path, name: str) -> dict[str, Any]:
    try:
        found = strict_json.parse(read(inside(root, name), _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{root / name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{root / name} is not an object")
    return found
