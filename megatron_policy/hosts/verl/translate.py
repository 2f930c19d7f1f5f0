"""From verl's sections of an engine to a policy's configuration.

Sections are verl's dataclasses, OmegaConf's nodes or plain mappings; verl is not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.section import asks_for_nothing
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.megatron_fields import ACCOUNTED
from megatron_policy.hosts.verl.sections import check_keys, overrides, plain, same_names

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("float32", "fp32", "torch.float32"), "float32"),
}
_INITIAL_LOSS_SCALE = 32768.0
_CONTENTS = frozenset({"model", "optimizer", "extra", "hf_model"})
_NO_LIMIT = 2**20
"""Positions, where the model does not say how many it has: its own limit is checked later."""


@dataclass(frozen=True)
class Translation:
    """A policy's configuration, and what the engine itself does."""

    policy: dict[str, Any]
    """For `PolicyConfig.parse`."""
    param_offload: bool
    optimizer_offload: bool
    grad_offload: bool
    """Whether gradients leave the device between calls: with the parameters, or alone."""
    forward_only: bool
    merge_adapters: bool
    replay: str
    """'R2' or 'R3' where chosen experts are taken again, otherwise 'disabled'."""
    save_contents: frozenset[str]
    load_contents: frozenset[str]
    names_latest: bool
    """Whether verl leaves it to the engine to say which step is the latest (`async_save`)."""
    warnings: tuple[str, ...]
    """Keys that ask for what is not done, and what happens instead."""

    def parse(self) -> PolicyConfig:
        """The configuration, checked."""
        return PolicyConfig.parse(self.policy)


def translate(
    model_config: Any,
    engine_config: Any,
    optimizer_config: Any = None,
    checkpoint_config: Any = None,
    *,
    replicas: int = 1,
) -> Translation:
    """What verl's sections ask for; `replicas` is the number of data-parallel ranks.

    ConfigError names every key of verl that would change results or memory and is not supported,
    and what to set.
    """
    sections = {
        "model.": plain(model_config),
        "engine.": plain(engine_config),
        "optim.": plain(optimizer_config),
        "checkpoint.": plain(checkpoint_config),
    }
    if "optimizer_impl" in sections["optim."]:
        raise ConfigError("optim has the keys of verl's FSDP engines: choose optim=megatron")
    warnings = check_keys(sections)
    model, engine, optim, checkpoint = sections.values()
    if _has_idle_coefficient(engine):
        warnings += (
            "engine.override_transformer_config.moe_aux_loss_coeff is ignored, as by verl's own "
            "engine: routers have no load balancing loss without moe_router_load_balancing_type",
        )
    lora = model.get("lora") or {}
    saved = _contents(checkpoint, "save_contents")
    return Translation(
        policy=_policy(model, engine, optim, replicas),
        param_offload=bool(engine.get("param_offload")),
        optimizer_offload=bool(engine.get("optimizer_offload")),
        grad_offload=bool(engine.get("param_offload") or engine.get("grad_offload")),
        forward_only=bool(engine.get("forward_only")),
        merge_adapters=bool(lora.get("merge")),
        replay=_replay(model, engine),
        save_contents=saved,
        load_contents=_contents(checkpoint, "load_contents", saved),
        names_latest=bool(checkpoint.get("async_save")),
        warnings=warnings,
    )


def _contents(
    checkpoint: Mapping[str, Any], key: str, default: frozenset[str] = frozenset()
) -> frozenset[str]:
    given = checkpoint.get(key)
    if isinstance(given, str):
        raise ConfigError(f"checkpoint.{key} must be a list, as in [{given}], not {given!r:.100}")
    found = frozenset(map(str, given)) if given else default or frozenset({"model", "optimizer"})
    if found - _CONTENTS:
        raise ConfigError(
            f"checkpoint.{key} has {sorted(found - _CONTENTS)}; legal: {sorted(_CONTENTS)}"
        )
    return found


def _policy(
    model: Mapping[str, Any], engine: Mapping[str, Any], optim: Mapping[str, Any], replicas: int
) -> dict[str, Any]:
    name = str(engine.get("dtype") or "bfloat16")
    if name not in _DTYPES:
        raise ConfigError(f"engine.dtype is {name!r}; legal: {', '.join(sorted(_DTYPES))}")
    precision = _DTYPES[name]
    limit = getattr(model.get("hf_config"), "max_position_embeddings", 0)
    longest = int(limit or _NO_LIMIT)
    tokens = {"enabled": True, "train_mb_tokens": longest, "logprob_mb_tokens": longest}
    batching = "sequence_packing" if engine.get("use_remove_padding", True) else "dynamic_batching"
    found: dict[str, Any] = {
        "model_name": model.get("local_path") or model.get("path"),
        "precision": precision,
        # The schedule counts samples, and one call to advance it is one of verl's steps.
        "train_global_batch_size": replicas,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": longest,
        "megatron_cfg": _megatron(model, engine, optim, precision),
        batching: tokens,
    }
    if _replay(model, engine) != "disabled":
        found["router_replay"] = {"enabled": True}
    if engine.get("seed") is not None:
        found["seed"] = engine["seed"]
    fields = _config_fields(model)
    kept = {key: value for key, value in fields.items() if key != "attn_implementation"}
    if kept:
        found["hf_config_overrides"] = kept
    if model.get("model_type") == "value_model":
        found["reward_model_cfg"] = {"enabled": True, "reward_model_type": "regression"}
    return _merge(found, engine.get("policy") or {})


def _config_fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of config.json; ConfigError for what verl has beside them for its own engine."""
    given: Mapping[str, Any] = model.get("override_config") or {}
    if "model_config" not in given:
        return given
    others = {key: value for key, value in given.items() if key != "model_config"}
    asked = [key for key, value in others.items() if not asks_for_nothing(value)]
    if asked:
        raise ConfigError(
            f"model.override_config.{asked[0]} is not supported: only model_config is read"
        )
    return given["model_config"] or {}


def _replay(model: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """The mode; verl replays nothing in a critic, whose experts are others."""
    if model.get("model_type") == "value_model":
        return "disabled"
    return str((engine.get("router_replay") or {}).get("mode") or "disabled")


def _megatron(
    model: Mapping[str, Any], engine: Mapping[str, Any], optim: Mapping[str, Any], precision: str
) -> dict[str, Any]:
    transformer = overrides(engine, "engine.", "override_transformer_config")
    if _has_idle_coefficient(engine):
        del transformer["moe_aux_loss_coeff"]
    if transformer.pop("moe_enable_deepep", False):
        transformer["moe_token_dispatcher_type"] = "flex"
    recomputed = {
        key: transformer.pop(key) for key in list(transformer) if key.startswith("recompute_")
    }
    accounted = [bool(transformer.pop(name, False)) for name in ACCOUNTED]
    found: dict[str, Any] = {
        "enabled": True,
        **same_names(engine, "engine.", "megatron_cfg."),
        "virtual_pipeline_model_parallel_size": (
            engine.get("virtual_pipeline_model_parallel_size") or 1
        ),
        "sequence_parallel": bool(engine.get("sequence_parallel", True))
        and engine.get("tensor_model_parallel_size") not in (None, 1),
        "optimizer": _optimizer(engine, optim, precision),
        "scheduler": _scheduler(optim),
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": False,
        }
        | overrides(engine, "engine.", "override_ddp_config"),
        **transformer,
    }
    if recomputed.get("recompute_granularity"):
        if recomputed["recompute_granularity"] == "full":
            recomputed.pop("recompute_modules", None)
        found |= {"activation_checkpointing": True} | recomputed
    found |= _layers(model) | _adapters(model)
    return found | (_lay_out(model, found, *accounted) if any(accounted) else {})


def _lay_out(
    model: Mapping[str, Any], megatron: Mapping[str, Any], embedding: bool, head: bool
) -> dict[str, Any]:
    """The layout in which the embedding, the head or both take the place of a layer."""
    config: Any = model.get("hf_config")
    layers = int((getattr(config, "text_config", None) or config).num_hidden_layers)
    chunks = int(megatron.get("pipeline_model_parallel_size") or 1)
    chunks *= int(megatron["virtual_pipeline_model_parallel_size"])
    each, left = divmod(layers + embedding + head, chunks)
    if left:
        raise ConfigError(
            f"{layers} layers and {embedding + head} for which embedding and head count "
            f"({', '.join(ACCOUNTED)}) are no multiple of {chunks} model chunks: leave these keys "
            "out, or use another number of stages"
        )
    counts = [each] * chunks
    counts[0] -= embedding
    counts[-1] -= head
    predicting = "m" * int(megatron.get("mtp_num_layers") or 0)
    written = "|".join("t" * count for count in counts)
    sizes = {"virtual_pipeline_model_parallel_size": 1}
    return sizes | {"pipeline_model_parallel_layout": f"E{written}{predicting}L"}


def _has_idle_coefficient(engine: Mapping[str, Any]) -> bool:
    """Whether there is a coefficient of a load balancing loss, and no loss: verl's engine has none
    unless it is told which.
    """
    given = engine.get("override_transformer_config") or {}
    own = (engine.get("policy") or {}).get("megatron_cfg") or {}
    kinds = (each.get("moe_router_load_balancing_type") for each in (given, own))
    return bool(given.get("moe_aux_loss_coeff")) and {*kinds} <= {None, "none"}


def _optimizer(
    engine: Mapping[str, Any], optim: Mapping[str, Any], precision: str
) -> dict[str, Any]:
    betas = given = optim.get("betas") or (0.9, 0.999)
    if isinstance(given, str):  # some of verl's scripts quote them twice
        with suppress(ValueError, SyntaxError):
            betas = ast.literal_eval(given)
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"optim.betas must be two numbers, as in [0.9, 0.95], not {given!r:.100}")
    found = {
        "optimizer": optim.get("optimizer") or "adam",
        "lr": optim.get("lr", 1e-3),
        "min_lr": optim.get("min_lr") or 0.0,
        "weight_decay": optim.get("weight_decay", 0.01),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "clip_grad": optim.get("grad_clip") or optim.get("clip_grad", 1.0),
    }
    if found["optimizer"] == "adam":
        found["use_distributed_optimizer"] = engine.get("use_distributed_optimizer", True)
    if precision == "float16":
        found["initial_loss_scale"] = _INITIAL_LOSS_SCALE
    return found | overrides(optim, "optim.", "override_optimizer_config")


def _scheduler(optim: Mapping[str, Any]) -> dict[str, Any]:
    """As verl's Megatron engine makes its schedule: one iteration is one of verl's steps."""
    total = int(optim.get("total_training_steps") or -1)
    decay = int(optim.get("lr_decay_steps") or total)
    warmup = int(optim.get("lr_warmup_steps") or -1)
    if warmup <= 0:
        warmup = max(0, int((optim.get("lr_warmup_steps_ratio") or 0.0) * decay))
    decays = optim.get("weight_decay", 0.01)
    return {
        # Before verl's trainer knows how many steps there are, any number above the warm-up does.
        "lr_decay_iters": decay if decay > 0 else warmup + 1,
        "lr_warmup_iters": warmup,
        "lr_warmup_init": optim.get("lr_warmup_init") or 0.0,
        "lr_decay_style": str(optim.get("lr_decay_style") or "constant").replace("_", "-"),
        "start_weight_decay": decays,
        "end_weight_decay": decays,
        "weight_decay_incr_style": "constant",
    }


def _layers(model: Mapping[str, Any]) -> dict[str, Any]:
    """Layers for multi-token prediction, where they are trained."""
    mtp = model.get("mtp") or {}
    if not (mtp.get("enable") and mtp.get("enable_train")):
        return {}
    config = model.get("hf_config")
    text = getattr(config, "text_config", None) or config
    names = "num_nextn_predict_layers", "mtp_num_hidden_layers"
    number = next((int(found) for name in names if (found := getattr(text, name, None))), 0)
    if not number:
        raise ConfigError(
            "model.mtp.enable_train is true, but the model's config.json has no "
            f"{' and no '.join(names)}: set it to false"
        )
    return {
        "mtp_num_layers": number,
        "mtp_loss_scaling_factor": mtp.get("mtp_loss_scaling_factor", 0.1),
        "mtp_detach_heads": bool(mtp.get("detach_encoder")),
    }


def _adapters(model: Mapping[str, Any]) -> dict[str, Any]:
    lora = model.get("lora") or {}
    if not (lora.get("rank") or lora.get("adapter_path")):
        return {}
    found = {"enabled": True, "dim": lora.get("rank") or None}
    found |= same_names(lora, "model.lora.", "megatron_cfg.peft.")
    if found.get("target_modules") in ("all-linear", ["all-linear"]):
        found["target_modules"] = []
    if lora.get("adapter_path"):
        found["start_from"] = lora["adapter_path"]
    if lora.get("dtype"):
        found["lora_dtype"] = _DTYPES.get(str(lora["dtype"]), str(lora["dtype"]))
    return {"peft": {key: value for key, value in found.items() if value is not None}}


def _merge(found: dict[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with `further` keys in place of its own, section by section."""
    return found | {
        key: _merge(found[key], value)
        if isinstance(value, Mapping) and isinstance(found.get(key), dict)
        else value
        for key, value in further.items()
    }
