"""Rotary position embedding in numbers (Su et al. 2021, "RoFormer") and the ways to scale it.

Knows neither Hugging Face nor Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths grow by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with sequences longer than `max_position` ("dynamic NTK")."""

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
    """The correction range is rounded to whole dimensions."""
    attention_factor: float
    """What cosine and sine are multiplied by."""


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): a factor per frequency, other ones for long texts."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    """Sequences longer than this are long."""
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first `fraction` of a head; frequencies may be scaled."""

    base: float
    scaling: Scaling | None = None
    fraction: float = 1.0
