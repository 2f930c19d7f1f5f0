"""Every configuration that the host ships, for this package's worker: accepted, or refused for what
is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Rejected
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from tests.hosts.real import recipes
from tests.hosts.real.recipes import checkout, for_our_worker, sections

NOT_SUPPORTED = {
    "megatron_cfg.fp8_cfg.enabled",
    "megatron_cfg.optimizer.optimizer_cpu_offload",
    "draft.enabled",
    "quant_cfg",
    "is_vlm",
}
"""What configurations of the host ask for in vain."""

EXPERT_BIAS = "megatron_cfg.moe_router_enable_expert_bias"
"""Refused for models without correction biases."""


def shipped() -> Iterator[tuple[str, dict[str, Any]]]:
    """File and policy, the teacher's and the value model's too, of every configuration of the host;
    a file that only has changes to another one names no model.
    """
    root = checkout()
    for file in sorted(root.glob("examples/**/*.yaml")):
        for section, raw in sections(file, "policy", "teacher", "value").items():
            if raw.get("model_name"):
                yield f"{file.relative_to(root)}:{section}", raw


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


def test_most_recipes_fit_their_models_and_engines_at_the_size_of_their_clusters() -> None:
    said = [recipes.refusal(document) for _, document in recipes.recipes()]
    assert len(said) > 100 and said.count("") >= 80
    for line in filter(None, said):
        path, _, _ = line.removeprefix("policy.").partition("=")
        known = {path, path.rpartition(".")[0]} & {*NOT_SUPPORTED, EXPERT_BIAS}
        method, _, _ = line.partition(":")
        known = known or {method} & {*NOT_IMPLEMENTED, "prepare_for_generation"}
        assert known or line.startswith(recipes.NOT_KNOWN), line
