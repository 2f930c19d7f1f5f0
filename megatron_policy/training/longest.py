"""The maximum length of a row, by the configuration and by the model's positions.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.errors import BatchError
from megatron_policy.packing.multiples import round_up


@dataclass(frozen=True)
class Longest:
    """The most tokens of a row: `configured` is max_total_sequence_length, `positions` is what the
    model supports. Padding does not count: rows without lengths can be wider by the host's padding,
    up to the next multiple of `multiple`.
    """

    configured: int
    positions: int
    multiple: int = 1

    @classmethod
    def of(cls, config: PolicyConfig, architecture: Architecture) -> Longest:
        """The limits of `config` and of this model."""
        positions = architecture.positions
        multiple = config.make_sequence_length_divisible_by
        return cls(config.max_total_sequence_length, positions, multiple)

    @property
    def tokens(self) -> int:
        """The smaller of both limits."""
        return min(self.configured, self.positions)

    def check(self, data: BatchedDataDict) -> None:
        """BatchError naming the longest row if it is too long. The length of a row of `input_ids`
        `[B, S]` is its `input_lengths` `[B]` if given, otherwise its width.
        """
        rows, width = data["input_ids"].shape
        lengths_B = data.get("input_lengths")
        if isinstance(lengths_B, torch.Tensor) and lengths_B.shape == (rows,) and rows:
            length, row = (int(found) for found in lengths_B.max(0))
            limit, what = self.tokens, f"row {row} has {length} tokens"
        else:
            length, limit = width, round_up(self.tokens, self.multiple)
            what = f"row 0, like all others, has {width} tokens (there are no input_lengths)"
        if length > limit:
            remedy = (
                "max_position_embeddings in its config.json if the model was trained for more"
                if length > self.positions
                else "max_total_sequence_length"
            )
            raise BatchError(
                f"{what}; at most max_total_sequence_length={self.configured} and the model's "
                f"{self.positions} positions are possible: truncate it, or raise {remedy}"
            )
