"""Adds the keys of verl's configuration to errors that name those of a policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Applied, Rejected
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.keys import SECTIONS, rule_of

_PATH = re.compile(r"\bpolicy\.(\w+(?:\.\w+)*)")
_OF_POLICY = "engine.policy."
"""The section for keys of a policy that verl has no name for."""
_NAMES = {
    "model_name": "model.path",
    "precision": "engine.dtype",
    "seed": "engine.seed",
    "hf_config_overrides": "model.override_config",
    "reward_model_cfg.enabled": "model.model_type",
    "router_replay.enabled": "engine.router_replay.mode",
    "sequence_packing.enabled": "engine.use_remove_padding",
    "dynamic_batching.enabled": "engine.use_remove_padding",
    "megatron_cfg.mtp_num_layers": "model.mtp.enable_train",
    "megatron_cfg.mtp_detach_heads": "model.mtp.detach_encoder",
    "megatron_cfg.optimizer.adam_beta1": "optim.betas",
    "megatron_cfg.optimizer.adam_beta2": "optim.betas",
    "megatron_cfg.scheduler.lr_decay_iters": "optim.lr_decay_steps",
    "megatron_cfg.scheduler.lr_warmup_iters": "optim.lr_warmup_steps",
    "megatron_cfg.scheduler.start_weight_decay": "optim.weight_decay",
    "megatron_cfg.scheduler.end_weight_decay": "optim.weight_decay",
    "megatron_cfg.peft.enabled": "model.lora.rank",
    "megatron_cfg.peft.dim": "model.lora.rank",
    "megatron_cfg.peft.lora_dtype": "model.lora.dtype",
    "megatron_cfg.peft.start_from": "model.lora.adapter_path",
}
_SECTIONS = {
    "hf_config_overrides.": ("model.override_config.",),
    "megatron_cfg.peft.": ("model.lora.",),
    "megatron_cfg.optimizer.": ("optim.", "engine.", "optim.override_optimizer_config."),
    "megatron_cfg.scheduler.": ("optim.",),
    "megatron_cfg.distributed_data_parallel_config.": ("engine.override_ddp_config.",),
    "megatron_cfg.": ("engine.", "model.mtp.", "engine.override_transformer_config."),
}
"""Sections of a policy, the inner ones first, and those of verl that have keys of the same name."""


@contextmanager
def with_verl_names() -> Iterator[None]:
    """Add verl's names of the policy's keys to the message of a ConfigError of this context."""
    try:
        yield
    except ConfigError as error:
        said = str(error)
        known = {path: name_in_verl(path) for path in _PATH.findall(said) if _is_key(path)}
        if not known:
            raise
        places = ", ".join(f"policy.{path} is {name}" for path, name in known.items())
        raise ConfigError(f"{said}\nIn verl's configuration, {places}") from error


def name_in_verl(path: str) -> str:
    """The key of verl's configuration that sets the one at this path below `policy`."""
    if path in _NAMES:
        return _NAMES[path]
    for section, theirs in _SECTIONS.items():
        name = path.removeprefix(section)
        if name == path or "." in name:
            continue
        for each in theirs:
            if each not in SECTIONS or _takes(each, name):
                return each + name
    return _OF_POLICY + path


def _takes(section: str, name: str) -> bool:
    rule = rule_of(section, name)
    return isinstance(rule, Applied) or (isinstance(rule, Rejected) and bool(rule.only))


def _is_key(path: str) -> bool:
    return path in KEYS or path.startswith("hf_config_overrides")
