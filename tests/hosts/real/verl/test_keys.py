"""Every field of verl's own classes of configuration has a rule."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    EngineRouterReplayConfig,
    HFModelConfig,
    McoreCheckpointConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    MtpConfig,
    QATEngineConfig,
)

from megatron_policy.hosts.verl.keys import SECTIONS, rule_of

CLASSES = {
    "engine.": [McoreEngineConfig],
    "engine.router_replay.": [EngineRouterReplayConfig],
    "engine.qat.": [QATEngineConfig],
    "optim.": [McoreOptimizerConfig],
    "model.": [HFModelConfig],
    "model.mtp.": [MtpConfig],
    "checkpoint.": [CheckpointConfig, McoreCheckpointConfig],
}
YAML = {
    "engine.": "engine/megatron",
    "optim.": "optim/megatron",
    "model.": "model/hf_model",
    "checkpoint.": "actor/megatron_actor",
}
"""Where verl's groups have a section: a group, whose `checkpoint` key it is for an actor."""


@pytest.mark.parametrize("prefix", CLASSES)
def test_every_field_of_verls_classes_has_a_rule(prefix: str) -> None:
    names = {field.name for each in CLASSES[prefix] for field in fields(each)}
    names = {name for name in names if not name.startswith("_")}
    assert names, "verl's classes have fields"
    assert sorted(name for name in names if rule_of(prefix, name) is None) == []


@pytest.mark.parametrize("prefix", YAML)
def test_every_key_of_verls_groups_has_a_rule(prefix: str) -> None:
    document = group(YAML[prefix])
    if prefix == "checkpoint.":
        document = document["checkpoint"]
    assert sorted(unknown(prefix, document)) == []


def group(name: str) -> dict[str, Any]:
    """A group of verl's configuration, with its defaults and nested sections."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    folder, _, _ = name.partition("/")
    with initialize_config_module("verl.trainer.config", version_base=None):
        node = compose(overrides=[f"+{name.replace('/', '=')}"])[folder]
    found: Any = OmegaConf.to_container(node, resolve=False)
    return found


def unknown(prefix: str, document: dict[str, Any]) -> list[str]:
    """Keys of a section, and of those within it, that have no rule."""
    found = []
    for name, value in document.items():
        if name.startswith("_"):
            continue
        if rule_of(prefix, name) is None:
            found.append(prefix + name)
        if f"{prefix}{name}." in SECTIONS and isinstance(value, dict):
            found += unknown(f"{prefix}{name}.", value)
    return found
