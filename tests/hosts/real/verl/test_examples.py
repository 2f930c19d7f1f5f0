"""verl's shipped Megatron examples: taken, or refused for what is not supported."""

from __future__ import annotations

import pytest

from megatron_policy.converters.registry import FAMILIES
from tests.hosts.real.verl.examples import (
    VISION,
    Example,
    checkout,
    examples,
    fields_of,
    refusal,
)

NOT_SUPPORTED = ("engine.use_dist_checkpointing=",)
"""What examples of supported model families ask for in vain."""


@pytest.fixture(scope="module")
def text_models() -> dict[Example, str]:
    """The examples that train a model of text alone, and what each is refused for."""
    root = checkout()
    if root is None:
        pytest.skip("verl is installed without its examples: set VERL_SOURCE to its sources")
    found, _ = examples(root)
    return {each: refusal(each) for each in found if not VISION.search(each.model)}


def family(example: Example) -> str:
    fields = fields_of(example.model)
    assert fields is not None, f"tests/hosts/real/verl/examples.py does not know {example.model}"
    return str(fields["model_type"])


def test_examples_of_supported_families_are_taken_or_ask_for_what_is_not_supported(
    text_models: dict[Example, str],
) -> None:
    supported = {each: why for each, why in text_models.items() if family(each) in FAMILIES}
    assert len(supported) >= 15
    for example, why in supported.items():
        for line in why.splitlines():
            assert line.startswith(NOT_SUPPORTED), f"{example.script}: {line}"
    assert sum(not why for why in supported.values()) >= 0.9 * len(supported)


def test_examples_of_other_families_are_refused(text_models: dict[Example, str]) -> None:
    others = [why for each, why in text_models.items() if family(each) not in FAMILIES]
    assert others and all(others)


def test_most_of_all_text_models_examples_are_taken(text_models: dict[Example, str]) -> None:
    taken = sum(not why for why in text_models.values())
    assert taken >= 0.7 * len(text_models)
