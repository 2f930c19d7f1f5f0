"""How a configuration wants its microbatches made; knows no rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.packing.multiples import NARROWEST, Multiples, round_up

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig

Kind = Literal["padded", "dynamic", "packed"]


@dataclass(frozen=True)
class Batching:
    """`padded`: microbatches of a number of rows. `dynamic`: of rows of similar length, at most
    `tokens` together with their padding. `packed`: of sequences one after another, at most
    `tokens` together; `algorithm` chooses which, ours where it is None.

    A dynamic microbatch is as wide as its longest row, rounded up to `round_to`; a packed sequence
    is rounded up to it on its own, and all of them together to `row_multiple`, as the layout needs
    it. `key` is where `tokens` comes from, for messages.
    """

    kind: Kind
    tokens: int = 0
    round_to: int = 1
    algorithm: str | None = None
    key: str = "tokens"
    row_multiple: int = 1

    @classmethod
    def of(cls, config: PolicyConfig, training: bool) -> Batching:
        """What `config` asks for, in training or where log-probabilities and the like are read.

        ConfigError where a microbatch's tokens are fewer than the layout can split.
        """
        name = "train_mb_tokens" if training else "logprob_mb_tokens"
        dynamic, packing = config.dynamic_batching, config.sequence_packing
        multiples = multiples_of(config)
        if dynamic.enabled:
            tokens, rounded = getattr(dynamic, name), dynamic.sequence_length_round
            assert tokens and rounded, "PolicyConfig.parse fills them in"
            round_to = math.lcm(rounded, multiples.row)
            made = cls("dynamic", tokens, round_to, None, f"dynamic_batching.{name}", multiples.row)
        elif packing.enabled:
            tokens, round_to = getattr(packing, name), multiples.sequence
            assert tokens, "PolicyConfig.parse fills it in"
            key = f"sequence_packing.{name}"
            made = cls("packed", tokens, round_to, packing.algorithm, key, multiples.row)
        else:
            return cls("padded")
        if made.tokens < made.row_multiple:
            raise ConfigError(
                f"policy.{made.key}={made.tokens} is less than {made.row_multiple}, the fewest "
                "positions that this layout and make_sequence_length_divisible_by can split: raise "
                "it"
            )
        return made

    @property
    def capacity(self) -> int:
        """Positions of a microbatch at most, padding counted in."""
        return self.tokens // self.row_multiple * self.row_multiple

    def size(self, length: int, width: int | None = None) -> int:
        """Positions that a sequence of `length` tokens takes with its own padding; in a padded
        microbatch of a tensor of `width` positions not more than these need.
        """
        if self.kind == "packed" or width is None:
            return round_up(length, self.round_to)
        widest = round_up(width, self.row_multiple)
        return min(round_up(max(length, min(width, NARROWEST)), self.round_to), widest)

    def check(self, lengths: Sequence[int], width: int | None = None) -> None:
        """BatchError naming the first row that does not fit into a microbatch."""
        if self.kind == "padded":
            return
        for row, length in enumerate(lengths):
            size = self.size(length, width)
            if size > self.capacity:
                padded = "" if size == length else f" ({size} with padding)"
                room = "" if self.capacity == self.tokens else f" (room for {self.capacity})"
                raise BatchError(
                    f"row {row} has {length} tokens{padded}, more than {self.key}={self.tokens}"
                    f"{room}: raise it or truncate the row"
                )


def multiples_of(config: PolicyConfig) -> Multiples:
    """What lengths are rounded up to under the configuration's layout."""
    megatron = config.megatron_cfg
    return Multiples.of(
        config.make_sequence_length_divisible_by,
        megatron.tensor_model_parallel_size,
        megatron.context_parallel_size,
        megatron.sequence_parallel,
    )
