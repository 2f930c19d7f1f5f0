"""Host memory that is reused, and storages that are emptied and refilled in place."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.memory.device_memory import StorageOffloader
from megatron_policy.memory.pinned_pool import ALIGNMENT, PinnedMemoryPool
from tests.other_process import OtherProcess

BLOCK = 4 * ALIGNMENT
SIZES = (100, 3 * ALIGNMENT, BLOCK, 2 * BLOCK + 7, 1)


def small_pool() -> PinnedMemoryPool:
    return PinnedMemoryPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), BLOCK)


def spans(region: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    return [(piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in region]


def test_regions_have_their_size_never_overlap_and_are_taken_again() -> None:
    pool = small_pool()
    regions = [pool.take(size) for size in SIZES]
    assert [sum(piece.numel() for piece in region) for region in regions] == list(SIZES)
    ends = sorted(span for region in regions for span in spans(region))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert sum(SIZES) <= pool.nbytes <= sum(SIZES) + len(SIZES) * ALIGNMENT + BLOCK
    first, made = [spans(region) for region in regions], pool.nbytes
    for _ in range(3):
        pool.reset()
        assert [spans(pool.take(size)) for size in SIZES] == first
    pool.release(regions[3])
    assert spans(pool.take(SIZES[3])) == first[3]
    assert pool.nbytes == made


def test_a_block_that_cannot_be_had_leaves_the_pool_as_it_was() -> None:
    refuse = False

    def allocate(nbytes: int) -> torch.Tensor:
        if refuse:
            raise RuntimeError("no host memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = PinnedMemoryPool(allocate, BLOCK)
    kept = spans(pool.take(100))
    refuse = True
    with pytest.raises(RuntimeError, match="no host memory"):
        pool.take(3 * BLOCK)
    refuse = False
    assert kept[0][1] <= spans(pool.take(10))[0][0] < kept[0][0] + BLOCK
    assert pool.nbytes == BLOCK


def storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def test_views_of_an_emptied_storage_hold_their_content_again_or_zeros_without_a_pool() -> None:
    whole = torch.randn(1000)
    views = [whole[10:20], whole.view(10, 100).t(), whole.view(torch.uint8)]
    expected = [view.clone() for view in (whole, *views)]
    offloader = StorageOffloader(small_pool())
    offloader.empty(storages([whole]))
    assert whole.untyped_storage().nbytes() == 0 and offloader.nbytes == 4000
    offloader.refill()
    assert offloader.nbytes == 0
    assert all(torch.equal(a, b) for a, b in zip((whole, *views), expected, strict=True))
    without_pool = StorageOffloader(None)
    without_pool.empty(storages([whole]))
    assert whole.untyped_storage().nbytes() == 0
    without_pool.refill()
    assert torch.equal(whole, torch.zeros(1000)) and without_pool.host_bytes == 0


class Limited:
    """Gives storages memory until the budget of calls is spent."""

    def __init__(self) -> None:
        self.left = 0

    def __call__(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if self.left == 0:
            raise RuntimeError("no device memory")
        self.left -= 1
        storage.resize_(nbytes)


@pytest.mark.parametrize("room_for", [0, 1, 2])
def test_a_refill_that_runs_out_of_room_goes_on_where_it_stopped(room_for: int) -> None:
    tensors = [torch.randn(size) for size in (700, 300, 900)]
    expected = [tensor.clone() for tensor in tensors]
    resize = Limited()
    offloader = StorageOffloader(small_pool(), resize)
    offloader.empty(storages(tensors))
    made = offloader.host_bytes
    for _ in range(4):  # what has come back may go again meanwhile, and takes no new memory
        resize.left = room_for
        with pytest.raises(RuntimeError, match="no device memory"):
            offloader.refill()
        back = [storage for storage in storages(tensors) if storage.nbytes()]
        assert len(back) == room_for
        assert offloader.nbytes + sum(each.nbytes() for each in back) == 4 * (700 + 300 + 900)
        offloader.empty(back)
        assert offloader.host_bytes == made
    resize.left = 3
    offloader.refill()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def fill_up() -> tuple[str, list[int], list[Any]]:
    """Empty 3 x 64 MiB, take the room for two of them away, refill, give the room back, refill."""
    tensors = [torch.full((16 << 20,), float(value)) for value in range(3)]
    offloader = StorageOffloader(PinnedMemoryPool())
    offloader.empty(storages(tensors))
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (96 << 20), unlimited[1]))
    try:
        offloader.refill()
        failed = ""
    except RuntimeError as error:
        failed = type(error).__name__
    back = [storage.nbytes() >> 20 for storage in storages(tensors)]
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    offloader.refill()
    return failed, back, [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.nightly
def test_a_process_that_is_really_out_of_memory_loses_nothing() -> None:
    process = OtherProcess()
    failed, back, values = process.call(fill_up)
    process.kill()
    assert failed and back == [64, 0, 0]
    assert values == [[0.0], [1.0], [2.0]]
