"""64-bit digests of tensors, computed where they are stored: xxh3 in host memory, a sum of products
elsewhere.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

HOST, DEVICE = "xxh3_64", "mixed_products_64"
"""Names of the two algorithms in a manifest; `products_64` of earlier releases is another one."""

_STEP = 1 << 22  # words per step: bounds the extra memory of the sum of products
_BLOCK = 1 << 10  # tensors whose sums share memory
_MASK, _HALF = (1 << 64) - 1, (1 << 32) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def algorithm_for(memory: Tensor) -> str:
    """The algorithm for memory on that device; both sides of a transport use the same one."""
    return HOST if memory.device.type == "cpu" else DEVICE


def digest(memory: Tensor, algorithm: str) -> int:
    """The digest of a contiguous tensor's bytes, in 0 .. 2**64 - 1. The host waits for it."""
    digests = Digests(algorithm)
    digests.add("", memory)
    return digests.read()[""]


class Digests:
    """Digests of many tensors. Those of a device are computed there without waiting, and copied to
    the host together, when they are read.
    """

    def __init__(self, algorithm: str) -> None:
        assert algorithm in (HOST, DEVICE), algorithm
        self.algorithm = algorithm
        self._known: dict[str, int] = {}
        self._sums: _Sums | None = None

    def add(self, name: str, memory: Tensor) -> None:
        """Add a contiguous tensor, whose memory can be reused by work that is queued later."""
        flat = memory.detach().reshape(-1).view(torch.uint8)
        if self.algorithm == HOST:
            self._known[name] = xxhash.xxh3_64_intdigest(flat.cpu().numpy().data)
            return
        if self._sums is None:
            self._sums = _Sums(flat.device)
        self._sums.add(name, flat)

    def read(self) -> dict[str, int]:
        """The digests of all tensors so far, each in 0 .. 2**64 - 1, in the order of `add`."""
        if self._sums is not None:
            self._known |= self._sums.read()
            self._sums = None
        return self._known


class _Sums:
    """For each tensor, the sum over its 64-bit words of mixed word * odd pseudo-random number of
    its position, modulo 2**64; and its last bytes, which make up no word. To mix a word, its upper
    half is added to its lower half, bit by bit.

    Changing one word always changes the sum, since odd numbers have inverses. Without the mixing,
    the sign at the top of a word would add 2**63 whatever its key, and two of them nothing. This is
    multilinear hashing with these numbers as keys, computed with whole-tensor operations only.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._names: list[tuple[str, int]] = []
        self._blocks: list[Tensor] = []
        self._keys = _keys(0, 0, where)  # of the first step, which is all of most tensors
        self._places = torch.arange(0, 64, 8, device=where)

    def add(self, name: str, flat_bytes: Tensor) -> None:
        """Queue the sums of these bytes."""
        row = len(self._names) % _BLOCK
        if row == 0:
            self._blocks.append(torch.zeros(_BLOCK, 2, dtype=torch.int64, device=self._where))
        total, rest = self._blocks[-1][row]
        count = flat_bytes.numel()
        self._names.append((name, count))
        whole = count // 8 * 8
        words = flat_bytes[:whole]
        # An empty tensor has no address, whatever its offset.
        if words.data_ptr() % 8 or words.storage_offset() % 8:
            words = words.clone()  # aligned, so that it can be read as words
        words = words.view(torch.int64)
        for first in range(0, words.numel(), _STEP):
            step = words[first : first + _STEP]
            mixed = (step >> 32).bitwise_and_(_HALF).bitwise_xor_(step)  # a logical shift
            total += mixed.mul_(self._keys_from(first, step.numel())).sum()
        if count > whole:
            last = flat_bytes[whole:].to(torch.int64)
            rest += (last << self._places[: count - whole]).sum()

    def _keys_from(self, first: int, count: int) -> Tensor:
        if first > 0:
            return _keys(first, count, self._where)
        if self._keys.numel() < count:
            self._keys = _keys(0, count, self._where)
        return self._keys[:count]

    def read(self) -> dict[str, int]:
        """The digests; the host waits once."""
        rows = torch.cat(self._blocks)[: len(self._names)].tolist()
        return {
            name: (total + _mix(rest + count)) & _MASK
            for (name, count), (total, rest) in zip(self._names, rows, strict=True)
        }


def _keys(first: int, count: int, where: torch.device) -> Tensor:
    """Odd int64 keys of positions from `first` on (splitmix64, wrapping around)."""
    state = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=where)
    state *= _to_signed(_GAMMA)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        state ^= (state >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift
        state *= _to_signed(factor)
    return state.bitwise_or_(1)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    return ((value ^ (value >> 27)) * _MIX_2) & _MASK


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
