"""Rotary position embedding in numbers (Su et al. 2021, "RoFormer") and the ways to scale it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_policy.errors import ConversionError


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths grow by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows for sequences longer than `max_position` ("dynamic NTK")."""

    factor: float
    max_position: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rotary scaling: wavelengths beyond the original context grow by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): fast rotations are kept, slow ones interpolated."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the correction range is rounded to whole dimensions."""
    attention_factor: float
    """Factor on cosine and sine."""


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): a factor per frequency, with separate factors for long texts."""

    # Left out of the hash, which keys the cache of layouts once per parameter.
    short: tuple[float, ...] = field(hash=False)
    long: tuple[float, ...] = field(hash=False)
    original_max_position: int
    """Sequences longer than this are long."""
    attention_factor: float


BY_LENGTH = (DynamicScaling, LongScaling)
"""With these the frequencies depend on the length of the text."""

Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `fraction` of a head; frequencies can be scaled."""

    base: float
    scaling: Scaling | None = None
    fraction: float = 1.0
    interleaved: bool = False
    """Pairs are neighbouring channels; otherwise one channel of each half."""
    axes: tuple[int, ...] = field(default=(), hash=False)
    """Which of a token's three positions, in time, height and width, turns each pair (multimodal
    RoPE, Wang et al. 2024, "Qwen2-VL"); empty if it has one position.
    """

    def size(self, head_dim: int) -> int:
        """Number of rotated channels per head."""
        return int(head_dim * self.fraction)

    def positions(self, max_position: int) -> int:
        """The longest text, in tokens, for which the frequencies are made.

        `max_position` is the config's limit, which scaling can extend.
        """
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return max(max_position, int(max_position * factor))
            case YarnScaling(factor, original):
                return max(max_position, int(original * factor))
        return max_position

    def longest(self, configured: int) -> int:
        """The length of text that engines assume which choose frequencies once, for texts of up to
        `configured` tokens. Dynamic scaling then has its base for the longest text it stretches to.
        """
        match self.scaling:
            case DynamicScaling(factor, max_position):
                return int(factor * max_position)
        return configured

    def check(self, head_dim: int) -> None:
        """Raise ConversionError unless heads of that size can be rotated like this."""
        size, pairs = self.size(head_dim), (self.size(head_dim) + 1) // 2
        if self.base <= 1 or not 2 <= size <= head_dim or head_dim % 2:
            raise ConversionError(
                "rope_theta must be > 1, and 2 or more channels of an even head size must be "
                f"rotated (got base {self.base:g}, {size} of {head_dim} channels)"
            )
        if self.axes and (len(self.axes) != pairs or isinstance(self.scaling, BY_LENGTH)):
            raise ConversionError(
                f"mrope_section must name the position of each of {pairs} rotated pairs (it names "
                f"{len(self.axes)}), whose frequencies do not depend on the length of the text"
            )
        if isinstance(self.scaling, DynamicScaling) and size < 4:
            raise ConversionError(f"dynamic scaling needs 4 rotated channels or more, not {size}")
        if isinstance(self.scaling, LongScaling):
            for name, factors in (("short", self.scaling.short), ("long", self.scaling.long)):
                if len(factors) != pairs:
                    raise ConversionError(
                        f"{name}_factor has {len(factors)} numbers; heads of {head_dim} have "
                        f"{pairs} rotated pairs of channels"
                    )
