"""Steps for which nothing counts: by default they are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.training.losses import ValidCounts, is_by_sequence

NO_TOKENS, NO_SEQUENCES = "no valid tokens", "no valid sequences"


@dataclass(frozen=True)
class EmptySteps:
    """When a step is left out because nothing counts in its global batch.

    All ranks have the counts of the global batch, so all of them decide alike. A gradient of 0 is
    no reason: optimizers with momentum go on from earlier gradients.
    """

    skip: bool
    """`policy.skip_empty_steps`."""
    scalar: bool
    """Whether the model has a scalar head, from which a loss can take a number of each row."""

    @classmethod
    def of(cls, config: PolicyConfig, architecture: Architecture) -> EmptySteps:
        """As the configuration asks for, for this model."""
        return cls(config.skip_empty_steps, scalar=architecture.head is not None)

    def reason(self, loss: Callable[..., Any], counts: ValidCounts) -> str:
        """Why the step is left out; empty if it is taken.

        A loss at the token level needs a valid token. One at the sequence level needs a valid
        sequence, and a valid token too, unless it scores rows by a scalar head.
        """
        if not self.skip:
            return ""
        if is_by_sequence(loss) and not counts.sequences.item():
            return NO_SEQUENCES
        if is_by_sequence(loss) and self.scalar:
            return ""
        return self.reason_of_tokens(counts.tokens.item())

    def reason_of_tokens(self, tokens: float) -> str:
        """The same for a loss that needs one of these valid tokens of the global batch."""
        return NO_TOKENS if self.skip and not tokens else ""
