"""Decays between the places of a chunk, from the logarithms of single tokens' decays.

Logarithms are added in fp64: sums reach hundreds, and what neighbours differ by would be lost in
fp32, in outputs and more so in gradients. Only their differences are rounded.

Shapes: C chunks of L places, H heads, K key channels, G groups of heads, S places of a part of
a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

PART = 16
"""Places of a part of a chunk, between which decays per channel are computed one by one."""


@dataclass(frozen=True)
class Decay:
    """Of log decays `[C, H, L]`, or `[C, H, L, K]` where channels of the key have their own. Each
    of these is between 0 and 1 and made of a difference that is never positive, however long the
    chunk and however strong the decay.
    """

    reach: torch.Tensor
    """From the chunk's beginning to each place, that included: `[C, H, L, 1]` or `[C, H, L, K]`."""
    left: torch.Tensor
    """From each place to the chunk's end, in the same shape."""
    whole: torch.Tensor
    """Through the chunk: `[C, H, 1, 1]` or `[C, H, K, 1]`."""
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of `x_CGLK` and `y_CGLK` the products `[C, H, i, j]` of x at i and y at j, decayed from j to
    i; 0 for j > i. `H / G` heads in a row share a group.
    """

    @classmethod
    def of(cls, log_CHL: torch.Tensor) -> Decay:
        dtype, by_channel = log_CHL.dtype, log_CHL.ndim == 4
        sums = log_CHL if by_channel else log_CHL.unsqueeze(-1)
        # Not cumsum's own dtype, whose gradient would be added up in that of its input.
        sums = sums.double().cumsum(2)
        reach, left = sums.exp().to(dtype), (sums[:, :, -1:] - sums).exp().to(dtype)
        whole = reach[:, :, -1].unsqueeze(-1)
        if by_channel:
            return cls(reach, left, whole, lambda x, y: _channel_products(x, y, sums))
        between = _between(sums.squeeze(-1), dtype)
        return cls(reach, left, whole, lambda x, y: share(x @ y.mT, between.size(1)) * between)


def share(x_G: torch.Tensor, heads: int) -> torch.Tensor:
    """`[., G, ...]` for each of its groups' heads, `[., H, ...]`."""
    groups = x_G.size(1)
    return x_G if groups == heads else x_G.repeat_interleave(heads // groups, 1)


def _between(sums: torch.Tensor, dtype: torch.dtype, place: int = -1) -> torch.Tensor:
    """Decays from the places j to the places i of the dimension `place`, as `[..., i, j, ...]`."""
    differences = (sums.unsqueeze(place) - sums.unsqueeze(place - 1)).to(dtype)
    # Before exp: what is later than i grows without bounds, and its gradient would be infinite.
    return differences.masked_fill(_later(sums, place), -torch.inf).exp()


def _later(sums: torch.Tensor, place: int) -> torch.Tensor:
    places = sums.size(place)
    later = torch.ones(places, places, dtype=torch.bool, device=sums.device).triu(1)
    return later.view(*later.shape, *[1] * (-1 - place))


def _channel_products(x: torch.Tensor, y: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """`Decay.products` where each channel decays by itself.

    A part of the chunk meets the places before it through its first place: the decays from there
    and up to there are factors of x and y, and the rest is a matrix product. Within a part the
    decays of all pairs are held, S times as many numbers as x has.
    """
    rows, places = [], x.size(2)
    x, y = (share(each, sums.size(1)) for each in (x, y))
    for start in range(0, places, PART):
        part = slice(start, start + PART)
        within = x[:, :, part].unsqueeze(3) * y[:, :, part].unsqueeze(2)
        blocks = [(within * _between(sums[:, :, part], x.dtype, -2)).sum(-1)]
        if start:
            edge = sums[:, :, start - 1 : start]
            near = x[:, :, part] * (sums[:, :, part] - edge).exp().to(x.dtype)
            far = y[:, :, :start] * (edge - sums[:, :, :start]).exp().to(x.dtype)
            blocks.insert(0, near @ far.mT)
        rows.append(F.pad(torch.cat(blocks, -1), (0, max(0, places - start - PART))))
    return torch.cat(rows, 2)
