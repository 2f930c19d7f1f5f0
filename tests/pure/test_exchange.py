"""Swaps of tensors with host memory: both sides get the other's bytes, also after an interrupt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.device import exchange
from megatron_policy.device.exchange import copy_out, swap
from megatron_policy.memory.pinned_pool import PinnedMemoryPool

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def made(shapes: list[tuple[int, int]], block: int) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors, and pairs of them with what they were."""
    random = torch.Generator().manual_seed(len(shapes))
    tensors = [
        torch.randint(-9, 9, shape, generator=random).to(DTYPES[index % 3])
        for index, shape in enumerate(shapes)
    ]
    pool = PinnedMemoryPool(block_bytes=block)
    pairs = [(tensor, pool.take(tensor.nbytes)) for tensor in tensors]
    copy_out(pairs)
    return tensors, pairs


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=6),
    block=st.sampled_from([512, 1024]),
)
def test_what_was_copied_out_comes_in_and_goes_back(
    shapes: list[tuple[int, int]], block: int
) -> None:
    tensors, pairs = made(shapes, block)
    first = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.add_(1)
    swap(pairs)
    assert all(map(torch.equal, tensors, first))
    swap(pairs)
    assert all(torch.equal(tensor, was + 1) for tensor, was in zip(tensors, first, strict=True))
    swap(pairs)
    assert all(map(torch.equal, tensors, first))
    swap([])


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_tensors_are_as_they_were_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, out: bool, number: int
) -> None:
    tensors, pairs = made([(3, 5), (2, 7), (4, 4), (1, 9)], 512)
    for tensor in tensors:
        tensor.add_(1)
    before = [tensor.clone() for tensor in tensors]
    original, calls = exchange._copy, iter(range(100))

    def interrupted(*arguments: Any, **direction: bool) -> None:
        if direction.get("out", False) == out and next(calls) == number:
            raise KeyboardInterrupt
        original(*arguments, **direction)

    monkeypatch.setattr(exchange, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap(pairs)
    assert all(map(torch.equal, tensors, before))
    swap(pairs)
    assert all(torch.equal(tensor, was - 1) for tensor, was in zip(tensors, before, strict=True))
