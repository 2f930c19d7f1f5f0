"""The sum that stands for a run: NumPy, Numba and torch compute what plain Python does, it follows
from changed words alone, and what once cancelled in it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas import arrays, codec
from megatron_policy.refit.deltas.arrays import pad_words
from megatron_policy.refit.digest import DEVICE, Digests, digest
from tests.pure.test_delta_codec import DTYPES, RUNS, make

FLOATS = {torch.float8_e4m3fn: 8, torch.bfloat16: 4, torch.float32: 2, torch.float64: 1}
"""How many are in a word."""


def compute(content: bytes) -> int:
    """The sum, as `arrays.py` describes it."""
    filled = content + bytes(8 - len(content) % 8)
    words = [int.from_bytes(filled[at : at + 8], "little") for at in range(0, len(filled), 8)]
    total = 0
    for place, word in enumerate((*words, len(content))):
        key = (place + 1) * 0x9E3779B97F4A7C15 % 2**64
        key = (key ^ key >> 32) * 0xBF58476D1CE4E5B9 % 2**64 | 1
        u = word * key % 2**64
        u ^= u >> 48
        u = (u + 1) * key % 2**64
        total += u ^ u >> 32
    return total % 2**64


def loops() -> Iterator[Any]:
    """The modules that compute it here."""
    yield arrays
    if codec._loops() is not arrays:
        yield codec._loops()


def sum_all_ways(tensor: Tensor) -> int:
    """The sum by each of them, which are equal."""
    bits = codec.view_bits(tensor)
    found = {int(module.sum_elements(bits)) for module in loops()} | {digest(tensor, DEVICE)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 2, 3, 7, 8, 9, 100_003])
def test_sums_are_as_documented(dtype: type, elements: int) -> None:
    _, run = make((dtype, elements, 0, elements))
    wanted = compute(run.tobytes())
    assert {int(module.sum_elements(run)) for module in loops()} == {wanted}
    memory = torch.zeros(run.nbytes, dtype=torch.uint8)
    memory.numpy()[:] = run.view(np.uint8)
    assert digest(memory, DEVICE) == wanted


def take(module: Any, now: Any, words: Any, first: int, last: int) -> Any:
    """What of a run is other `now`, all of which follows one another."""
    kept = words.view(now.dtype)
    return module.take_changes(
        now, np.zeros(1, np.int64), len(now), kept, first, last, np.uint16(0)
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(RUNS, st.integers(0, 100), st.integers(0, 2000))
def test_parts_of_a_run_are_taken_as_the_whole_is(run: tuple, first: int, cut: int) -> None:
    now, before = make(run)
    first, cut = min(first, len(now)), min(cut, len(now))
    now[:first] = before[:first]
    first, cut = min(first, cut), max(first, cut)
    for module in loops():
        kept, parts = pad_words(before), pad_words(before)
        whole = take(module, now[first:], kept, first, -1)
        one = take(module, now[first:cut], parts, first, -1)
        two = take(module, now[cut:], parts, cut, one[2])
        assert np.array_equal(whole[0], np.concatenate((one[0], two[0])))
        assert np.array_equal(whole[1], np.concatenate((one[1], two[1])))
        assert (int(whole[2]), int(whole[3])) == (
            int(two[2]),
            (int(one[3]) + int(two[3])) % codec.SUMS,
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(RUNS)
def test_the_sum_of_a_run_grows_by_what_changes_and_is_that_of_its_elements(run: tuple) -> None:
    now, before = make(run)
    for module in loops():
        grown = int(take(module, now, pad_words(before), 0, -1)[3])
        sums = [int(module.sum_elements(each)) for each in (before, now)]
        assert (sums[0] + grown) % codec.SUMS == sums[1]
        assert (grown == 0) == (now.tobytes() == before.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_loops_give_what_arrays_do(dtype: type) -> None:
    compiled = pytest.importorskip("megatron_policy.refit.deltas.compiled")
    cases = [(0, 0, -1), (63, 0, -1), (64, 7, 2), (700, 100, 5), (300_001, 2**17 - 1, -1)]
    for elements, first, last in cases:
        for share in (0, 0.001, 0.01, 0.3, 1):
            now, before = make((dtype, first + elements, share, elements))
            one, other = pad_words(before), pad_words(before)
            found = take(compiled, now[first:], one, first, last)
            wanted = take(arrays, now[first:], other, first, last)
            assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])
            assert found[2:] == wanted[2:]
            after = np.concatenate((before[:first], now[first:]))
            assert one.tobytes() == other.tobytes() == pad_words(after).tobytes()


@pytest.mark.parametrize(("count", "length"), [(1, 700), (3, 64), (40, 129), (2, 300_000), (5, 1)])
@pytest.mark.parametrize("dtype", [*DTYPES, np.float32])
def test_pieces_are_taken_as_what_they_make_together(dtype: type, count: int, length: int) -> None:
    """Of fp32 as torch makes it bfloat16: to even, with NaN and infinities."""
    generator, gap, first = np.random.default_rng(0), 17, 9
    memory = generator.integers(0, 256, (count * (length + gap)) * 8, np.uint8)
    now = memory.view(dtype)[: count * (length + gap)]
    starts = np.arange(count, dtype=np.int64) * (length + gap) + 3
    joined = now[(starts[:, None] + np.arange(length)).reshape(-1)]
    nan = codec.view_bits(torch.full((64,), torch.nan).bfloat16())[0]
    if dtype == np.float32:
        now = now.view(np.uint32)
        joined = codec.view_bits(torch.from_numpy(joined).bfloat16())
    before = np.concatenate((generator.integers(0, 9, first).astype(joined.dtype), joined))
    changed = generator.random(len(before)) < 0.1
    changed[:first] = False
    before[changed] ^= 1
    for module in loops():
        one, other = pad_words(before), pad_words(before)
        kept = one.view(joined.dtype)
        found = module.take_changes(now, starts, length, kept, first, -1, nan)
        wanted = take(module, joined, other, first, -1)
        assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])
        assert found[2:] == wanted[2:] and len(found[0]) == changed.sum()
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flipped_signs_make_a_difference(dtype: torch.dtype) -> None:
    """Every set of signs within a word, in two words; then those of whole tensors."""
    in_word, generator = FLOATS[dtype], torch.Generator().manual_seed(0)
    tensors = [torch.zeros(64 * in_word), torch.randn(64 * in_word, generator=generator)]
    for tensor in (each.to(dtype) for each in tensors):
        seen, count = {sum_all_ways(tensor)}, 1
        for flipped in range(1, 1 << in_word):
            signs = torch.tensor([-1.0 if flipped >> bit & 1 else 1.0 for bit in range(in_word)])
            for words in ([3], [3, 40], [9, 10], [0, 1, 2, 3], [*range(64)]):
                changed = tensor.double().view(64, in_word).clone()
                changed[words] *= signs.double()
                seen.add(sum_all_ways(changed.reshape(-1).to(dtype)))
                count += 1
        assert len(seen) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_signs_in_random_places_make_a_difference(dtype: torch.dtype) -> None:
    """Of elements of opposite signs, which were negated in two words of one tensor, unseen."""
    generator, in_word = torch.Generator().manual_seed(0), FLOATS[dtype]
    tensor = torch.randn(4096, in_word, generator=generator).to(dtype)
    of_word = [in_word // 2 - 1, in_word - 1]
    opposite = (tensor[:, of_word] < 0).sum(1) == 1
    hits = opposite.nonzero().flatten()
    seen, before = set(), sum_all_ways(tensor)
    for _ in range(200):
        changed, two = tensor.clone(), torch.randperm(len(hits), generator=generator)[:2]
        rows = hits[two].unsqueeze(1)
        changed[rows, of_word] = -changed[rows, of_word]
        seen.add(sum_all_ways(changed))
    assert len(seen) == 200 and before not in seen


@pytest.mark.parametrize("fill", ["zeros", "equal", "random"])
def test_bits_flipped_in_one_word_or_in_two_make_a_difference(fill: str) -> None:
    """The same bit of two words, and every two bits of a word in two words."""
    random = np.random.default_rng(0)
    words = {
        "zeros": np.zeros(256, np.uint64),
        "equal": np.full(256, 0x3F803F803F803F80, np.uint64),
        "random": random.integers(0, 2**64, 256, np.uint64),
    }[fill]
    flips = [1 << bit for bit in range(64)]
    flips += [1 << one | 1 << other for one, other in combinations(range(64), 2)]
    seen, count = {int(codec.sum_elements(words))}, 1
    for flip in flips:
        for places in ([17], [100], [17, 100], [5, 6], [0, 255]):
            changed = words.copy()
            changed[places] ^= np.uint64(flip)
            seen.add(int(codec.sum_elements(changed)))
            count += 1
    assert len(seen) == count


def test_equal_changes_of_many_words_do_not_cancel_in_any_part_of_the_sum() -> None:
    """What two words add cancels in 32 bits of the sum as seldom as drawn numbers would."""
    random, count = np.random.default_rng(0), 1 << 18
    words = random.standard_normal(2 * count).astype(np.float32).view(np.uint64)
    keys = arrays._make_keys(np.arange(count, dtype=np.uint64))
    before = arrays._mix(words, keys)
    for flip in (1 << 63, 1 << 62, 1 << 31, 1 << 63 | 1 << 31, 0x8000800080008000, 1 << 55, 1):
        grown = arrays._mix(words ^ np.uint64(flip), keys) - before
        for shift in (0, 16, 32):
            parts = [
                np.sort(each >> np.uint64(shift) & np.uint64(2**32 - 1))
                for each in (grown, np.uint64(0) - grown)
            ]
            found = np.searchsorted(*parts[::-1], "right") - np.searchsorted(*parts[::-1])
            assert found.sum() < 64, hex(flip)  # 16 on average, in twos


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_changes_places_makes_a_difference(dtype: torch.dtype) -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    words, halves = tensor.view(torch.int64), tensor.view(torch.int32)
    found, count = {sum_all_ways(tensor)}, 1
    for of, pairs in (
        (words, [(0, 1), (3, 400), (511, 512)]),
        (halves, [(0, 1), (1, 2), (0, 2), (5, 900)]),
        (tensor, [(2, 3), (0, 4095), (76, 77)]),
    ):
        for one, other in pairs:
            swapped = of.clone()
            swapped[[one, other]] = of[[other, one]]
            found.add(sum_all_ways(swapped))
            count += 1
    found |= {sum_all_ways(each) for each in (tensor.flip(0), tensor.roll(1), tensor.roll(8))}
    assert len(found) == count + 3


def test_zeros_of_every_length_have_sums_of_their_own() -> None:
    sums = [sum_all_ways(torch.zeros(length, dtype=torch.uint8)) for length in range(300)]
    assert len(set(sums)) == len(sums)


def test_digests_of_another_version_are_refused_with_the_fix() -> None:
    with pytest.raises(RefitError, match=r"mixed_products_64.*same version on both sides"):
        Digests("mixed_products_64")
