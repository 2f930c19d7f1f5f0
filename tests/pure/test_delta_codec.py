"""Changed elements are found, and every encoding of them is undone by its inverse; what is
malformed is refused.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.refit.deltas import codec
from megatron_policy.refit.deltas.arrays import pad_words
from megatron_policy.refit.deltas.codec import BITMAP, GAPS, WHOLE, WIDE_GAPS, Encoded

DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
RUNS = st.tuples(
    st.sampled_from(DTYPES), st.integers(0, 700), st.floats(0, 1), st.integers(0, 2**32 - 1)
)
"""A dtype, the number of elements, how many of them change, and a seed."""


def make(run: tuple[type, int, float, int]) -> tuple[codec.Bits, codec.Bits]:
    """A run before and after."""
    dtype, elements, share, seed = run
    random = np.random.default_rng(seed)
    before = random.integers(0, 256, elements * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    return before ^ (random.random(elements) < share).astype(dtype), before


def encode(now: codec.Bits, before: codec.Bits) -> Encoded:
    words = pad_words(before)
    taken = codec.take_changes(now, words)
    assert words.tobytes() == pad_words(now).tobytes()
    return codec.encode(taken.values, taken.gaps, now)


def decode(encoded: Encoded, run: codec.Bits) -> codec.Change:
    """All parts together."""
    parts = [*codec.decode(encoded, len(run), run.itemsize)]
    if not parts:
        return codec.Change(np.zeros(0, np.int64), run[:0])
    return codec.Change(*map(np.concatenate, zip(*parts, strict=True)))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(RUNS)
def test_what_is_found_and_encoded_makes_the_old_elements_the_new_ones(run: tuple) -> None:
    now, before = make(run)
    positions, values = decode(encode(now, before), now)
    changed = np.flatnonzero(now != before)
    assert np.array_equal(positions, changed) or len(positions) == len(now)
    after = before.copy()
    after[positions] = values
    assert after.tobytes() == now.tobytes()


@pytest.mark.parametrize(
    ("gap", "encoding"),
    [(2000, WIDE_GAPS), (300, GAPS), (100, GAPS), (8, GAPS), (4, BITMAP), (1, WHOLE)],
)
def test_the_smallest_encoding_is_chosen(gap: int, encoding: str) -> None:
    before = np.zeros(40_000, np.uint16)
    now = before.copy()
    now[::gap] = 1
    encoded = encode(now, before)
    assert encoded.encoding == encoding
    gaps = encoded.changes * (1 + (gap > 255))
    index = {GAPS: gaps, WIDE_GAPS: gaps, BITMAP: 5_000, WHOLE: 0}[encoding]
    assert abs(len(encoded.content) - 2 * encoded.changes - index) <= 1  # the first gap is shorter


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("changed", [0.0001, 0.001, 0.01, 0.03, 0.2, 0.7, 1.0])
def test_random_changes_take_the_bytes_that_are_expected(changed: float, kind: type) -> None:
    before = np.zeros(1 << 22, kind)
    now = (np.random.default_rng(0).random(len(before)) < changed).astype(kind)
    content = encode(now, before).content
    # A binomial number of changes; of the 419 of the fewest, four standard deviations are 0.2.
    spread = 0.01 + 4 / np.sqrt(changed * len(before))
    expected = codec.expect_bytes(changed, before.itemsize) * len(before)
    assert abs(len(content) / expected - 1) < spread


@pytest.mark.parametrize("changed", [0.01, 0.3, 0.9, 1.0])
def test_what_encodes_and_decodes_takes_few_times_the_bytes_of_a_run(
    changed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_PART", 1 << 12)
    now = (np.random.default_rng(0).random(1 << 20) < changed).astype(np.uint16)
    taken = codec.take_changes(now, pad_words(np.zeros_like(now)))
    tracemalloc.start()
    encoded = codec.encode(taken.values, taken.gaps, now)
    for_encoding = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    for _ in codec.decode(encoded, len(now), now.itemsize):
        pass
    for_decoding = tracemalloc.get_traced_memory()[1] - len(encoded.content)
    tracemalloc.stop()
    assert for_encoding < 2 * now.nbytes and for_decoding < now.nbytes / 4


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.integers(0, 300) | st.integers(65_000, 140_000) | st.integers(0, 2**24),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from((GAPS, WIDE_GAPS)),
)
def test_gaps_of_every_length_are_read_as_they_were_written(gaps: list[int], kind: str) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    packed = codec.pack_gaps(positions, codec._NUMBERS[kind])
    assert np.array_equal(np.concatenate([*codec._unpack_gaps(packed)]), positions)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    RUNS,
    st.sampled_from((BITMAP, GAPS, WIDE_GAPS, WHOLE, "none")),
    st.integers(-1, 700),
    st.binary(),
)
def test_malformed_bytes_are_refused_or_are_a_change_of_that_run(
    run: tuple, encoding: str, count: int, content: bytes
) -> None:
    now, before = make(run)
    own = encode(now, before)
    for encoded in (Encoded(encoding, count, content), own._replace(content=own.content[:-1])):
        try:
            positions, values = decode(encoded, now)
        except ValueError:
            continue
        assert len(positions) == len(values) == encoded.changes
        assert (np.diff(positions, prepend=-1) > 0).all()
        assert not len(positions) or positions[-1] < len(now)


@pytest.mark.parametrize(
    ("encoding", "index"),
    [
        (GAPS, b"\xff"),
        (GAPS, b"\x05\xff"),
        (GAPS, b"\x05\x04"),
        (WIDE_GAPS, b"\x05"),
        (WIDE_GAPS, b"\xff\xff"),
        (WIDE_GAPS, b"\x05\x01"),
    ],
)
def test_gaps_that_are_cut_or_too_long_are_refused(encoding: str, index: bytes) -> None:
    with pytest.raises(ValueError, match=r"gap|positions|size"):
        decode(Encoded(encoding, 1, b"vv" + index), np.zeros(10, np.uint16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_bits_are_those_of_the_tensor_in_its_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([-0.0, 1.0, float("nan")]).to(dtype)
    bits = codec.view_bits(tensor)
    bits[0] = 0
    assert bits.itemsize == dtype.itemsize and not torch.signbit(tensor.float()[0])
    assert not len(codec.take_changes(bits, pad_words(codec.view_bits(tensor.clone()))).values)
