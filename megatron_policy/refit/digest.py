"""64-bit digests of tensors, computed where they are stored: xxh3 in host memory, a sum of products
elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import xxhash
from torch import Tensor

HOST, DEVICE = "xxh3_64", "products_64"
"""Names of the two algorithms in a manifest."""

_STEP = 1 << 22  # words per step: bounds the extra memory of the sum of products
_MASK = (1 << 64) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def algorithm_for(memory: Tensor) -> str:
    """The algorithm for memory on that device; both sides of a transport use the same one."""
    return HOST if memory.device.type == "cpu" else DEVICE


def digest(memory: Tensor, algorithm: str) -> int:
    """The digest of a contiguous tensor's bytes, in 0 .. 2**64 - 1."""
    flat = memory.detach().reshape(-1).view(torch.uint8)
    if algorithm == HOST:
        return xxhash.xxh3_64_intdigest(flat.cpu().numpy().data)
    assert algorithm == DEVICE, algorithm
    return sum_of_products(flat)


def sum_of_products(flat_bytes: Tensor) -> int:
    """Sum over 64-bit words of word * odd pseudo-random number of its position, modulo 2**64.

    Changing one word always changes the sum, since odd numbers have inverses. This is multilinear
    hashing with these numbers as keys, computed in place with whole-tensor operations only.
    """
    count = flat_bytes.numel()
    whole = count // 8 * 8
    words = _aligned(flat_bytes[:whole]).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat_bytes.device)
    for first in range(0, words.numel(), _STEP):
        step = words[first : first + _STEP]
        keys = _first_keys(step.device) if first == 0 else _keys(first, step.numel(), step.device)
        total += (step * keys[: step.numel()]).sum()
    rest = bytes(flat_bytes[whole:].cpu().tolist()) if count > whole else b""
    return (int(total) + _mixed(int.from_bytes(rest, "little") + count)) & _MASK


def _aligned(flat_bytes: Tensor) -> Tensor:
    """The bytes, aligned so that they can be read as words."""
    return flat_bytes if flat_bytes.data_ptr() % 8 == 0 else flat_bytes.clone()


@lru_cache(maxsize=1)
def _first_keys(where: torch.device) -> Tensor:
    """The keys of the first step, which is all of most tensors; they are kept."""
    return _keys(0, _STEP, where)


def _keys(first: int, count: int, where: torch.device) -> Tensor:
    """Odd int64 keys of positions from `first` on (splitmix64, wrapping around)."""
    state = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=where)
    state *= _signed(_GAMMA)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        state ^= _shifted(state, shift)
        state *= _signed(factor)
    return state.bitwise_or_(1)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    return ((value ^ (value >> 27)) * _MIX_2) & _MASK


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
