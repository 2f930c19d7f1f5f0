"""Every configuration that the host ships, for this package's worker: accepted, or refused for what
is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Rejected
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from tests.hosts.real import recipes
from tests.hosts.real.recipes import checkout, for_our_worker, sections

NOT_SUPPORTED = {
    "megatron_cfg.fp8_cfg.enabled",
    "megatron_cfg.optimizer.optimizer_cpu_offload",
    "draft.enabled",
    "quant_cfg",
}
"""What configurations of the host ask for in vain."""

_OFFLOADED = "policy.megatron_cfg.optimizer.optimizer_cpu_offload=True"
_EXPERTS_APART = "policy.dtensor_cfg.expert_parallel_size="
_OMNI, _SUPER = "vlm_grpo-nemotron-omni-30ba3b-", "nemotron-super-omni-120ba12b-"
_VL = "vlm_grpo-qwen2.5-vl-3b-instruct-clevr-"
_ASYNC = f"vlm_grpo-{_SUPER}16n8g-megatron-tp8ep16cp2-async-gym"
SEEING: dict[bool, dict[str, str]] = {
    True: {
        f"mopd-{_SUPER}10n8g-megatron-tp8ep16cp2-async-gym.v1": "",
        f"mopd-{_SUPER}4n8g-smoke.v1": "",
        f"{_OMNI}16n8g-megatron-tp4ep4-async-gym-video.v1": _OFFLOADED,
        f"{_OMNI}2n8g-megatron-tp4ep4-gym-video.v1": _OFFLOADED,
        f"{_OMNI}circle-click-2n8g-megatron-tp2ep8.v1": _OFFLOADED,
        f"{_OMNI}clevr-1n8g-megatron-tp8ep8.v1": "",
        f"{_OMNI}mmpr-4n8g-megatron-tp8ep16.v1": "",
        f"{_ASYNC}-mtp-specdec.v1": "",
        f"{_ASYNC}-mtp.v1": "",
        f"{_ASYNC}.v1": "",
        "vlm_grpo-qwen2.5-omni-3b-avqa-1n8g-megatron.v1": "",
        "vlm_grpo-qwen2.5-omni-7b-audiomcq-1n8g-megatron.v1": "",
        "vlm_grpo-qwen2.5-omni-7b-intent-1n8g-megatron.v1": "",
        f"{_VL}1n4g-megatrontp1.v1": "",
        f"{_VL}1n8g-megatrontp2.v1": "",
        "vlm_grpo-qwen3-omni-30ba3b-audiomcq-4n8g-megatron.v1": "",
        "vlm_grpo-qwen3.5-35ba3b-geo3k-2n8g-megatron-ep16": "",
    },
    False: {
        f"{_VL}1n4g-dtensor2tp1.v1": "",
        f"{_VL}1n8g-dtensor2tp1.v1": "",
        f"{_OMNI}clevr-1n8g-automodel-ep8.v1": _EXPERTS_APART,
        f"{_OMNI}mmpr-4n8g-automodel-ep8.v1": _EXPERTS_APART,
        "vlm_grpo-qwen3.5-35ba3b-geo3k-2n8g-automodel-ep16": _EXPERTS_APART,
        "vlm_grpo-gemma4-e4b-geo3k-1n8g-automodel": recipes.NOT_KNOWN,
    },
}
"""By whether it is for Megatron, every recipe that sees or hears, and how what it is refused for
begins; nothing if it is taken.
"""

OURS = Path(__file__).parents[3] / "examples" / "recipes"
OUR_KEYS = ("policy.metrics.jsonl", "policy.max_patches_per_microbatch", "policy.scheduler")
"""Read by this package alone, or null where a base has a value."""
FREE = "policy.generation.vllm_kwargs."
"""What the host hands to its engine unread."""

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
    assert len(said) > 100 and said.count("") >= 100
    for line in filter(None, said):
        path, _, _ = line.removeprefix("policy.").partition("=")
        known = {path, path.rpartition(".")[0]} & {*NOT_SUPPORTED, EXPERT_BIAS}
        method, _, _ = line.partition(":")
        known = known or {method} & {*NOT_IMPLEMENTED, "prepare_for_generation"}
        assert known or line.startswith(recipes.NOT_KNOWN), line


@pytest.mark.parametrize("megatron", SEEING)
def test_each_recipe_that_sees_or_hears_is_taken_or_refused_for_what_is_known(
    megatron: bool,
) -> None:
    expected = SEEING[megatron]
    said = {
        Path(name).name.removesuffix(".yaml"): recipes.refusal(document)
        for name, document in recipes.recipes("vlm", megatron=megatron)
    }
    assert said.keys() == expected.keys()
    assert {name for name, why in said.items() if not why} == {
        name for name, why in expected.items() if not why
    }
    for name, why in said.items():
        assert why.startswith(expected[name]), f"{name}: {why}"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in OURS.glob("*/nemo_rl.yaml")))
def test_a_recipe_of_ours_is_taken_and_sets_only_what_its_base_has(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omegaconf import OmegaConf

    monkeypatch.setenv("NEMO_RL", str(checkout()))
    file = OURS / folder / "nemo_rl.yaml"
    assert recipes.refusal(sections(file, "cluster", "policy")) == ""

    def set_by(path: Path) -> set[str]:
        own: Any = OmegaConf.to_container(OmegaConf.load(path))
        below = own.get("defaults", []) if path.is_relative_to(checkout()) else []
        below = [below] if isinstance(below, str) else below
        return set(paths_of(own)).union(*(set_by(path.parent / each) for each in below))

    base = set_by(Path(OmegaConf.load(file)["defaults"][0]))
    own = set_by(file) | set_by(file.with_name("policy.yaml"))
    replaced = {path for path in own if any(each.startswith(f"{path}.") for each in base)}
    further = {path for path in own - base - replaced if not path.startswith(FREE)}
    assert further <= {"defaults", *OUR_KEYS}, "the host's driver would not know them"


def paths_of(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values of a configuration."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from paths_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
