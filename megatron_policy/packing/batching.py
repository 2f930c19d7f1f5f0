"""How a configuration wants its microbatches made; knows no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_policy.errors import BatchError
from megatron_policy.packing.dynamic import padded_length

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig

Kind = Literal["padded", "dynamic", "packed"]


@dataclass(frozen=True)
class Batching:
    """`padded`: microbatches of a number of rows. `dynamic`: of rows of similar length, at most
    `tokens` together with their padding. `packed`: of sequences one after another, at most
    `tokens` together; `algorithm` chooses which, ours where it is None.

    A dynamic microbatch is as wide as its longest row, rounded up to `round_to`; a packed sequence
    is rounded up to it on its own. `key` is where `tokens` comes from, for messages.
    """

    kind: Kind
    tokens: int = 0
    round_to: int = 1
    algorithm: str | None = None
    key: str = "tokens"

    @classmethod
    def of(cls, config: PolicyConfig, training: bool) -> Batching:
        """What `config` asks for, in training or where log-probabilities and the like are read."""
        name = "train_mb_tokens" if training else "logprob_mb_tokens"
        dynamic, packing = config.dynamic_batching, config.sequence_packing
        if dynamic.enabled:
            tokens, round_to = getattr(dynamic, name), dynamic.sequence_length_round
            assert tokens and round_to, "PolicyConfig.parse fills them in"
            return cls("dynamic", tokens, round_to, None, f"dynamic_batching.{name}")
        if packing.enabled:
            tokens = getattr(packing, name)
            assert tokens, "PolicyConfig.parse fills it in"
            # Each context-parallel rank computes two chunks of every sequence.
            ranks = config.megatron_cfg.context_parallel_size
            round_to = 2 * ranks if ranks > 1 else 1
            return cls("packed", tokens, round_to, packing.algorithm, f"sequence_packing.{name}")
        return cls("padded")

    def size(self, length: int, width: int | None = None) -> int:
        """Positions that a sequence of `length` tokens takes with its own padding; in a padded
        microbatch of a tensor of `width` positions not more than these.
        """
        return padded_length(length, self.round_to, width if self.kind == "dynamic" else None)

    def check(self, lengths: Sequence[int], width: int | None = None) -> None:
        """BatchError naming the first row that is longer than `tokens`."""
        if self.kind == "padded":
            return
        for row, length in enumerate(lengths):
            size = self.size(length, width)
            if size > self.tokens:
                padded = "" if size == length else f" ({size} with padding)"
                raise BatchError(
                    f"row {row} has {length} tokens{padded}, more than {self.key}={self.tokens}: "
                    "raise it or truncate the row"
                )
