"""Every configuration that the host ships, for this package's worker: accepted, or refused for what
is not supported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Rejected
from megatron_policy.errors import ConfigError

NOT_SUPPORTED = {
    "megatron_cfg.fp8_cfg.enabled",
    "megatron_cfg.peft.enabled",
    "draft.enabled",
    "reward_model_cfg.enabled",
    "hf_config_overrides",
    "quant_cfg",
    "is_vlm",
}
"""What configurations of the host ask for in vain."""


def shipped() -> Iterator[tuple[str, dict[str, Any]]]:
    """File and policy, the teacher's too, of every configuration that the host can resolve."""
    from omegaconf import DictConfig, OmegaConf

    loader: Any = importlib.import_module("nemo_rl.utils.config")
    for name, function in {"mul": lambda a, b: a * b, "max": max}.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    if hasattr(loader, "register_omegaconf_resolvers"):
        loader.register_omegaconf_resolvers()
    root = _checkout()
    for file in sorted(root.glob("examples/**/*.yaml")):
        document = loader.load_config(str(file))
        for section in ("policy", "teacher"):
            found = document.get(section)
            if isinstance(found, DictConfig):
                name = f"{file.relative_to(root)}:{section}"
                raw: Any = OmegaConf.to_container(found, resolve=True)
                yield name, raw


def _checkout() -> Path:
    spec = importlib.util.find_spec("nemo_rl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def for_our_worker(raw: dict[str, Any]) -> dict[str, Any]:
    """The same with Megatron switched on, and the length of training that the driver adds."""
    megatron = raw.setdefault("megatron_cfg", {}) or {}
    megatron |= {"enabled": True, "train_iters": megatron.get("train_iters", 1000)}
    return raw | {"megatron_cfg": megatron, "dtensor_cfg": {"enabled": False}}


def test_every_shipped_configuration_is_accepted_or_asks_for_what_is_not_supported() -> None:
    accepted, refused = [], {}
    for name, raw in shipped():
        try:
            PolicyConfig.parse(for_our_worker(raw))
        except ConfigError as error:
            refused[name] = str(error).splitlines()
        else:
            accepted.append(name)
    for name, lines in refused.items():
        for line in lines:
            path = line.removeprefix("policy.").partition("=")[0]
            section = path.rpartition(".")[0]
            assert {path, section} & NOT_SUPPORTED, f"{name}: {line}"
            assert isinstance(KEYS.get(path, KEYS.get(f"{section}.*")), Rejected)
    assert len(accepted) > len(refused)
