"""Rotary frequencies of an architecture; knows nothing of modules.

Sources: Su et al. 2021, "RoFormer"; the scaling of long context in "The Llama 3 Herd of Models"
(2024).
"""

from __future__ import annotations

import math

import torch

from megatron_policy.converters.rotary import Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, fp32 `[head_dim / 2]`, on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.base**exponents)
    if rope.scaling is None:
        return frequencies
    return _scale_llama3(frequencies, rope.scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended linearly in 1
    / wavelength.
    """
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * stretched + blend * frequencies
    return torch.where(
        wavelengths > longest,
        stretched,
        torch.where(wavelengths < shortest, frequencies, blended),
    )
