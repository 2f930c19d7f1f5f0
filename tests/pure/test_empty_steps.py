"""When a step is left out because nothing counts: by its loss, its head and the key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_policy.interfaces import LossType
from megatron_policy.training.empty_steps import NO_SEQUENCES, NO_TOKENS, EmptySteps
from megatron_policy.training.losses import ValidCounts

TOKEN, SEQUENCE, UNSAID = LossType.TOKEN_LEVEL, LossType.SEQUENCE_LEVEL, None
HOSTS_OWN = SimpleNamespace(value="sequence_level")
"""A host brings its own enumeration."""


@pytest.mark.parametrize(
    ("level", "scalar", "sequences", "tokens", "reason"),
    [
        (TOKEN, False, 3, 1e-30, ""),
        (TOKEN, False, 3, 0, NO_TOKENS),
        (TOKEN, True, 3, 0, NO_TOKENS),
        (TOKEN, False, 0, 0, NO_TOKENS),
        (UNSAID, False, 3, 0, NO_TOKENS),
        (UNSAID, False, 0, 5, ""),
        (SEQUENCE, False, 0, 0, NO_SEQUENCES),
        (SEQUENCE, False, 3, 5, ""),
        (SEQUENCE, False, 3, 0, NO_TOKENS),
        (SEQUENCE, True, 3, 0, ""),
        (SEQUENCE, True, 0, 0, NO_SEQUENCES),
        (HOSTS_OWN, False, 0, 0, NO_SEQUENCES),
        (HOSTS_OWN, True, 1, 0, ""),
    ],
)
def test_a_step_needs_what_its_loss_is_made_of(
    level: object, scalar: bool, sequences: float, tokens: float, reason: str
) -> None:
    def loss() -> None: ...

    loss.loss_type = level  # type: ignore[attr-defined]
    counts = ValidCounts(torch.tensor(float(sequences)), torch.tensor(float(tokens)))
    assert EmptySteps(skip=True, scalar=scalar).reason(loss, counts) == reason
    assert EmptySteps(skip=False, scalar=scalar).reason(loss, counts) == ""


def test_a_host_that_counts_tokens_itself_is_told_the_same() -> None:
    assert EmptySteps(skip=True, scalar=True).reason_of_tokens(0.0) == NO_TOKENS
    assert EmptySteps(skip=True, scalar=False).reason_of_tokens(1.0) == ""
    assert EmptySteps(skip=False, scalar=False).reason_of_tokens(0.0) == ""
