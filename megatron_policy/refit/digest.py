"""64-bit digests of tensors, computed where they are stored: xxh3 in host memory, a sum of mixed
words elsewhere.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from megatron_policy.errors import RefitError

HOST, DEVICE = "xxh3_64", "mixed_words_64"
"""Names of the two algorithms in a manifest; `products_64` and `mixed_products_64` of earlier
releases are other ones.
"""

FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom generators)."""

_STEP = 1 << 22  # words per step: bounds the extra memory of the sum
_BLOCK = 1 << 10  # tensors whose sums share memory
_MASK = (1 << 64) - 1


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
        """RefitError for an algorithm that this version has not."""
        if algorithm not in (HOST, DEVICE):
            raise RefitError(
                f"digests {algorithm!r:.40} are of another version of megatron-policy: use the "
                "same version on both sides"
            )
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
    """For each tensor, the sum that `deltas/arrays.py` defines, in two parts: of its words of 64
    bits, with whole-tensor operations only; and its last bytes, which make up no word.

    A change of one word always changes it; of several, but for a chance of about one in 2**64.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._names: list[tuple[str, int]] = []
        self._blocks: list[Tensor] = []
        # Of the first step, which is all of most tensors.
        self._keys = torch.empty(0, dtype=torch.int64, device=where)
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
            keys = self._keys_from(first, step.numel())
            mixed = _fold(step * keys, torch.int16)
            torch.addcmul(keys, mixed, keys, out=mixed)
            total += _fold(mixed, torch.int32).sum()
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
            name: (total + _mix(rest, count // 8) + _mix(count, count // 8 + 1)) & _MASK
            for (name, count), (total, rest) in zip(self._names, rows, strict=True)
        }


def _fold(words: Tensor, part: torch.dtype) -> Tensor:
    """Flip the bits of the lowest part of each word that are set in its highest: `w ^= w >> n`,
    in one pass, with a shift that brings no sign along.
    """
    parts = words.view(part).view(-1, words.itemsize // part.itemsize)
    parts[:, 0].bitwise_xor_(parts[:, -1])
    return words


def _keys(first: int, count: int, where: torch.device) -> Tensor:
    """Odd int64 keys of places from `first` on."""
    keys = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=where)
    keys *= _to_signed(FIRST)
    return _fold(keys, torch.int32).mul_(_to_signed(SECOND)).bitwise_or_(1)


def _mix(word: int, place: int) -> int:
    key = (place + 1) * FIRST & _MASK
    key = (key ^ key >> 32) * SECOND & _MASK | 1
    mixed = word * key & _MASK
    mixed = ((mixed ^ mixed >> 48) + 1) * key & _MASK
    return mixed ^ mixed >> 32


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
