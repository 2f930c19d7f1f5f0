"""The interfaces have the members that algorithms call; independent of implementations."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from megatron_policy.interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    GenerationOutputSpec,
    LogprobOutputSpec,
    LossInputType,
    LossType,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
)


@pytest.mark.parametrize(
    "interface", [PolicyInterface, ColocatablePolicyInterface, GenerationInterface]
)
def test_an_implementation_must_have_every_method(interface: Any) -> None:
    """tests/public_api.txt has their arguments."""
    methods = {name for name in dir(interface) if not name.startswith("_")}
    assert len(methods) > 2 and interface.__abstractmethods__ == methods


def test_results_have_the_keys_that_algorithms_read() -> None:
    assert LogprobOutputSpec.__required_keys__ == {"logprobs"}
    assert ReferenceLogprobOutputSpec.__required_keys__ == {"reference_logprobs"}
    assert GenerationOutputSpec.__required_keys__ == {
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
    }


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LossType, {"token_level", "sequence_level"}),
        (LossInputType, {"logit", "logprob", "value", "score"}),
    ],
)
def test_kinds_of_losses_have_the_values_that_hosts_use(
    kind: type[enum.Enum], values: set[str]
) -> None:
    assert {member.value for member in kind} == values
