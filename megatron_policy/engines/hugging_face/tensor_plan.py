"""Which modules of a transformers model tensor-parallel ranks share, and how: transformers' own
plan, one of this package where that has none, or the one that `custom_parallel_plan` names.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from megatron_policy.config.fsdp import DTensorConfig
from megatron_policy.errors import ConfigError

KEY = "policy.dtensor_cfg.custom_parallel_plan"


class Style(Enum):
    """How ranks share a module, by transformers' names."""

    COLUMNS = "colwise"
    """Each rank has a share of a linear layer's outputs, and leaves them split."""
    ROWS = "rowwise"
    """Each rank has a share of a linear layer's inputs, which come split; outputs are summed."""
    COLUMNS_GATHERED = "colwise_gather_output"
    """As COLUMNS; then every rank gathers all outputs."""
    ROWS_SPLIT = "rowwise_split_input"
    """As ROWS, of inputs that every rank has whole."""
    EXPERTS = "moe_tp_experts"
    """Each rank has a share of every expert of a stack."""
    SINKS = "local_sinks"
    """Each rank has the sinks of its heads."""


_ALSO = {"colwise_rep": Style.COLUMNS_GATHERED, "rowwise_rep": Style.ROWS_SPLIT}
"""What earlier releases of transformers call them."""
_FOLLOWS = ("embedding_rowwise", "replicated_with_grad_allreduce", "sequence_parallel")
"""Styles with nothing to do: what they say follows from the others."""
_LAYER = "model.layers.*."
_ATTENTION = {f"{_LAYER}self_attn.{name}_proj": "colwise" for name in "qkv"}
_ATTENTION |= {f"{_LAYER}self_attn.o_proj": "rowwise"}
_MLP = {f"{_LAYER}mlp.{name}_proj": "colwise" for name in ("gate", "up")}
_MLP |= {f"{_LAYER}mlp.down_proj": "rowwise"}
_EXPERTS = {f"{_LAYER}mlp.experts": "moe_tp_experts"}
_SURROUNDED = {
    name.replace("model.", "model.language_model.", 1): style
    for name, style in (_ATTENTION | _MLP).items()
}
_OURS: dict[str, dict[str, str]] = {
    "glm4_moe_lite": _MLP | _EXPERTS,
    "gpt_oss": _ATTENTION | _EXPERTS | {f"{_LAYER}self_attn": "local_sinks"},
    "hunyuan_v1_dense": _ATTENTION | _MLP,
    "qwen2_5_omni_thinker": _SURROUNDED,
    "qwen2_5_vl": _SURROUNDED,
    "qwen3_vl": _SURROUNDED,
}
"""By transformers' name of the model, where its own plan has nothing but the ends, or styles that
are not supported: latent attention stays whole.
"""

_RANDOM = re.compile(r"drop|jitter")
"""Names of rates in a config of transformers at which something is drawn while training."""
Plan = dict[str, Style]
"""By the name of a module. The embedding and the head are not in it."""


def plan_of(settings: DTensorConfig, model: Any) -> Plan:
    """The plan for `model`; ConfigError, naming the fix, if there is none or it cannot be used."""
    custom = settings.custom_parallel_plan
    if any(getattr(model.config, "activation_sparsity_pattern", None) or ()):
        raise ConfigError(
            f"tensor-parallel ranks cannot share {type(model).__name__}, whose MLPs take "
            "statistics of all features: set policy.dtensor_cfg.tensor_parallel_size to 1"
        )
    for name, value in vars(model.config).items():
        drawn = _RANDOM.search(name) and not name.startswith("classifier")
        if drawn and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"{type(model).__name__} has {name}={value}, and tensor-parallel ranks would not "
                f"draw alike: set policy.hf_config_overrides.{name} to 0.0"
            )
    kind = getattr(model.config, "model_type", "")
    given = _import_plan(custom) if custom else _OURS.get(kind) or getattr(model, "tp_plan", None)
    found: Plan = {}
    modules = dict(model.named_modules())
    for pattern, asked in (given or {}).items():
        expected = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in modules if name and expected.fullmatch(name)]
        if custom and not names:
            raise ConfigError(
                f"{KEY}={custom!r}: no module of {type(model).__name__} is called {pattern!r}. "
                "Give names such as model.layers.*.self_attn.q_proj, or leave it out"
            )
        # Parameters have entries too, which follow from their module's.
        style = _find_style(pattern, asked, settings) if names else None
        if style is not None:
            found |= dict.fromkeys(names, style)
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found = {name: style for name, style in found.items() if id(modules[name]) not in ends}
    if not found and custom:
        raise ConfigError(
            f"{KEY}={custom!r} names the embedding and the head alone, which are split "
            "anyway: name linear layers, such as model.layers.*.mlp.gate_proj"
        )
    if not found:
        raise ConfigError(
            f"transformers has no plan of how tensor-parallel ranks share {type(model).__name__}: "
            f"set policy.dtensor_cfg.tensor_parallel_size to 1, or give a plan by {KEY}"
        )
    return found


def _import_plan(path: str) -> Mapping[str, Any]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        found = found() if callable(found) else found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{KEY}={path!r} cannot be used: {error}. Give the import path of a dict, or of a "
            "function without arguments that returns one"
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ConfigError(
            f"{KEY}={path!r} is not a plan: give a dict from names of modules, with * for numbers, "
            "to styles such as 'colwise' and 'rowwise'"
        )
    return found


def _find_style(pattern: str, asked: Any, settings: DTensorConfig) -> Style | None:
    """The style of a plan's entry; None if it says what follows from the others."""
    if isinstance(asked, SequenceParallel):
        if not settings.sequence_parallel:
            raise ConfigError(
                f"{KEY} gives {pattern!r} SequenceParallel: set "
                "policy.dtensor_cfg.sequence_parallel to true, or leave it out of the plan"
            )
        return None
    if isinstance(asked, ColwiseParallel | RowwiseParallel):
        return _translate_style(pattern, asked, settings.sequence_parallel)
    if isinstance(asked, str) and (asked in _FOLLOWS or asked in _ALSO):
        return _ALSO.get(asked)
    try:
        return Style(asked)
    except ValueError as error:
        legal = ", ".join(repr(style.value) for style in Style)
        raise ConfigError(
            f"the plan of tensor parallelism gives {pattern!r} the style {asked!r}, which is not "
            f"supported: give {legal}, or torch's ColwiseParallel or RowwiseParallel, by {KEY}"
        ) from error


def _translate_style(pattern: str, asked: Any, sequence: bool) -> Style:
    """The style that one of torch's objects means; ConfigError for layouts that none has."""
    columns = isinstance(asked, ColwiseParallel)
    outer = [Replicate(), Shard(1)] if sequence else [Replicate()]
    (before,), (after,) = asked.input_layouts, asked.output_layouts
    if columns and before in outer and after == Shard(-1):
        return Style.COLUMNS
    if columns and before in outer and after == Replicate():
        return Style.COLUMNS_GATHERED
    if not columns and before == Shard(-1) and after in outer:
        return Style.ROWS
    if not columns and before == Replicate() and after in outer:
        return Style.ROWS_SPLIT
    raise ConfigError(
        f"{KEY} gives {pattern!r} {type(asked).__name__} from {before} to {after}, which is not "
        "supported: inputs of columns and outputs of rows are replicated (or Shard(1) with "
        "policy.dtensor_cfg.sequence_parallel), what is between them Shard(-1)"
    )


def linears(module: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """The linear layers in a module."""
    for each in module.modules():
        if isinstance(each, torch.nn.Linear):
            yield each
