"""verl's shipped Megatron examples: taken, or refused for what is not supported."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl

from megatron_policy.converters.registry import FAMILIES
from tests.hosts.real.verl.examples import (
    KEEPS_OLD_WEIGHTS,
    enlarged,
    fields_of,
    refusal,
    refused_upstream,
    sees,
)
from tests.hosts.real.verl.shipped import TRAINERS, Example, checkout, document_of, examples

NOT_SUPPORTED = ("engine.use_dist_checkpointing=", KEEPS_OLD_WEIGHTS)
"""What examples of supported model families ask for in vain."""
SEEING = {
    f"{folder}/run_{name}.sh"
    for folder, names in {
        "examples/grpo_trainer": (
            *("qwen2_5_vl_7b_megatron", "qwen3_5_122b_a10b_megatron", "qwen3_5_35b_megatron"),
            *("qwen3_5_397b_megatron", "qwen3_vl_235b_a22b_megatron", "qwen3_vl_30b_a3b_megatron"),
            "qwen3_vl_8b_megatron",
        ),
        "examples/sft/gsm8k": ("qwen3_5_397b_a17b_megatron",),
        "examples/sft/vlm": ("qwen3_vl_2b_fsdp",),
        "tests/special_e2e": ("v1_separate_async_opd",),
    }.items()
    for name in names
}
"""The examples whose models see pictures."""
TENSOR = "megatron.tensor_model_parallel_size"


@pytest.fixture(scope="module")
def shipped_examples() -> dict[Example, str]:
    """The examples, and what each is refused for."""
    root = checkout()
    if root is None:
        pytest.skip("verl is installed without its examples: set VERL_SOURCE to its sources")
    found, _ = examples(root)
    return {each: refusal(each) for each in found}


def family(example: Example) -> str:
    fields = fields_of(example.model)
    assert fields is not None, f"tests/hosts/real/verl/examples.py does not know {example.model}"
    return str(fields["model_type"])


def test_examples_of_supported_families_are_taken_or_ask_for_what_is_not_supported(
    shipped_examples: dict[Example, str],
) -> None:
    supported = {
        each: why
        for each, why in shipped_examples.items()
        if family(each) in FAMILIES and not refused_upstream(each)
    }
    assert len(supported) >= 25
    for example, why in supported.items():
        for line in why.splitlines():
            assert line.startswith(NOT_SUPPORTED), f"{example.source}: {line}"
    assert sum(not why for why in supported.values()) >= 0.9 * len(supported)


def test_every_example_whose_model_sees_is_taken(shipped_examples: dict[Example, str]) -> None:
    seeing = {each.source: why for each, why in shipped_examples.items() if sees(each)}
    assert seeing == dict.fromkeys(SEEING, "")


def test_examples_of_other_families_are_refused(shipped_examples: dict[Example, str]) -> None:
    others = [why for each, why in shipped_examples.items() if family(each) not in FAMILIES]
    assert others and all(others)


def test_what_megatron_core_refuses_is_taken_on_more_ranks(
    shipped_examples: dict[Example, str],
) -> None:
    for example, why in shipped_examples.items():
        if refused_upstream(example):
            assert why and not refusal(enlarged(example)), example.source


def test_most_of_all_examples_are_taken(shipped_examples: dict[Example, str]) -> None:
    taken = sum(not why for why in shipped_examples.values())
    assert taken >= 0.7 * len(shipped_examples)


def example(*overrides: str) -> Example:
    """verl's own configuration of a Megatron engine with a critic, with these changes."""
    root, path = Path(verl.__file__).parents[1], "model.path=/models/Qwen3-8B"
    start = ["--config-name=ppo_trainer", "model_engine=megatron", f"critic.{path}"]
    overrides = (f"actor_rollout_ref.{path}", *overrides)
    return Example("", document_of(root, root / TRAINERS, [*start, *overrides]), 8)


def test_a_configuration_counts_as_taken_only_if_its_engines_fit_in_one_process() -> None:
    both = (f"actor_rollout_ref.actor.{TENSOR}=2", f"critic.{TENSOR}=2")
    assert not refusal(example(*both))
    assert "in another layout: tp 1 (not 2)" in refusal(example(*both[:1]))
    assert not refusal(example(*both[:1], "critic.enable=false"))
    other = example(
        *both,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.megatron.sequence_parallel=false",
    )
    assert "agree in policy.megatron_cfg.sequence_parallel: True and False" in refusal(other)


def test_a_layout_is_tried_on_as_many_ranks_as_the_configuration_has() -> None:
    experts = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    large = example(f"{experts}=16", "critic.enable=false")
    assert "does not divide the 8 ranks" in refusal(large)
    assert "(8) is not divisible by" in refused_upstream(large)
    assert enlarged(large).ranks == 16 and not refused_upstream(enlarged(large))
    assert not refused_upstream(example())
