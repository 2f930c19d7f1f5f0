"""The interfaces have the members that algorithms call; independent of implementations."""

from __future__ import annotations

import enum
import inspect
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

POLICY = {
    "get_logprobs": ["data"],
    "get_reference_policy_logprobs": ["data"],
    "train": ["data", "loss_fn", "eval_mode", "gbs", "mbs"],
    "prepare_for_training": ["args", "kwargs"],
    "finish_training": ["args", "kwargs"],
    "save_checkpoint": ["args", "kwargs"],
    "shutdown": [],
}
COLOCATABLE = POLICY | {
    "init_collective": ["ip", "port", "world_size"],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "prepare_refit_info": [],
    "prepare_weights_for_ipc": ["args", "kwargs"],
    "get_weights_ipc_handles": ["keys"],
    "broadcast_weights_for_collective": [],
}
GENERATION = {
    "generate": ["data", "greedy"],
    "prepare_for_generation": ["args", "kwargs"],
    "finish_generation": ["args", "kwargs"],
}


@pytest.mark.parametrize(
    ("interface", "methods"),
    [
        (PolicyInterface, POLICY),
        (ColocatablePolicyInterface, COLOCATABLE),
        (GenerationInterface, GENERATION),
    ],
)
def test_an_implementation_must_have_every_method_under_its_public_arguments(
    interface: Any, methods: dict[str, list[str]]
) -> None:
    assert interface.__abstractmethods__ == methods.keys()
    for name, arguments in methods.items():
        parameters = inspect.signature(getattr(interface, name)).parameters
        assert list(parameters) == ["self", *arguments], name


def test_training_and_generating_need_data_only() -> None:
    train = inspect.signature(PolicyInterface.train).parameters
    assert [train[name].default for name in ("eval_mode", "gbs", "mbs")] == [False, None, None]
    assert inspect.signature(GenerationInterface.generate).parameters["greedy"].default is False


def test_a_class_that_lacks_a_method_cannot_be_made() -> None:
    lacking = type("Lacking", (PolicyInterface,), dict.fromkeys(POLICY.keys() - {"train"}, print))
    with pytest.raises(TypeError, match="train"):
        lacking()


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
