"""Gated delta net (Yang et al. 2024, "Gated Delta Networks"): a state that forgets, and that each
token corrects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_policy.errors import ConversionError

from .checks import check_factors, check_sizes
from .part import Slabs, SplitCount
from .recurrence import HeadRows, Recurrence

QUERY, KEY = (HeadRows("num_key_heads", "key_head_dim", name) for name in ("query", "key"))
VALUE, GATE = (HeadRows("num_value_heads", "value_head_dim", name) for name in ("value", "z"))
BETA, ALPHA = (HeadRows("num_value_heads", 1, name) for name in ("beta", "alpha"))
"""How strongly the state is corrected, and how fast it decays."""


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Recurrence):
    """Per value head a state of key x value channels; value heads in a row share a key head, which
    has a query and a key. Queries, keys and values are convolved. Each head's output is normalised
    alone, all with the same weights, and multiplied by its gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    taps: int
    doubled: bool = False
    """The state is corrected by up to twice what is missing: parts of it can change their sign."""
    norm_epsilon: float | None = None
    """Of the norm of heads' outputs; None: as of the model's other norms."""

    place: ClassVar[str] = "self_attention"

    def __post_init__(self) -> None:
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "taps"
        check_sizes(self, *names, "projected_size", of="delta_net.")
        check_factors(self, "norm_epsilon")
        if self.num_value_heads % self.num_key_heads:
            raise ConversionError(
                f"{self.num_value_heads} value heads of a delta net must be a multiple of its "
                f"{self.num_key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all values, and of all gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def projected_size(self) -> int:
        return self.convolved_size + self.value_size + 2 * self.num_value_heads

    @property
    def convolved_size(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def inner_size(self) -> int:
        return self.value_size

    @property
    def memory_size(self) -> int:
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def steps_size(self) -> int:
        return 2 * self.num_value_heads

    @property
    def sizes(self) -> tuple[object, ...]:
        heads = self.num_key_heads, self.num_value_heads
        return *heads, self.key_head_dim, self.value_head_dim, self.taps

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        keys = SplitCount(self.num_key_heads, "key heads of a delta net")
        return SplitCount(self.num_value_heads, "value heads of a delta net"), keys

    @property
    def context_splits(self) -> tuple[SplitCount, ...]:
        values, keys = self.splits
        return values, keys._replace(multiples=True)

    def split(self, tp: int, cp: int) -> DeltaNet:
        ranks = tp * cp
        keys, values = max(1, self.num_key_heads // ranks), self.num_value_heads // ranks
        return replace(self, num_key_heads=keys, num_value_heads=values)

    def count_slab(self, slabs: Slabs) -> int:
        """Queries and keys as they are, scaled, of each value head, and both decayed; values, what
        would be written without the state, and twice what is; six products of all pairs of a chunk;
        twice the state before it.
        """
        heads, keys = self.num_value_heads, self.num_key_heads
        repeated = 2 * heads * self.key_head_dim * (heads != keys)
        of_keys = 4 * self.key_size + 4 * heads * self.key_head_dim + repeated
        token = of_keys + 4 * self.value_size + heads * (6 * slabs.chunk + 9) + 2 * keys
        return token * slabs.tokens + 2 * self.memory_size * slabs.chunks

    def count_memory_flops(self) -> int:
        """What the state has for the key, its correction, and what it has for the query."""
        return 6 * self.memory_size
