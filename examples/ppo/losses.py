"""The losses of the reward model and of the value model, as their workers call them.

Shapes: B rows, S positions. Each loss divides by counts of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_policy import LossInputType, LossType

Batch = Mapping[str, Tensor]
Result = tuple[Tensor, dict[str, float]]


@dataclass(frozen=True)
class PreferenceLoss:
    """Bradley and Terry 1952: rows 0, 2, 4, ... are preferred to the rows after them."""

    loss_type: ClassVar[LossType] = LossType.SEQUENCE_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.SCORE
    rows_per_group: ClassVar[int] = 2

    def __call__(
        self, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor, scores: Tensor
    ) -> Result:
        better, worse = scores[::2], scores[1::2]
        loss = -logsigmoid(better - worse).sum() / (global_valid_seqs / 2)
        return loss, {"loss": loss.item()}


@dataclass(frozen=True)
class ValueLoss:
    """Squared error of values against `returns` `[B, S]`, where `token_mask` is 1."""

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.VALUE

    def __call__(
        self, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor, values: Tensor
    ) -> Result:
        error = (values - data["returns"]).square() * data["value_mask"]
        loss = 0.5 * error.sum() / global_valid_toks
        return loss, {"loss": loss.item()}
