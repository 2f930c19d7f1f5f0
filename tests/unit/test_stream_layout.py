"""Streams and chunks: every byte once, every tensor whole, whatever the sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.collective.stream import (
    ALIGNMENT,
    ChunkReader,
    Stream,
    StreamLayout,
    StreamSlot,
    WholeReader,
    Writer,
    make_views,
)

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64)


@dataclass
class Sent:
    """A chunk under way: it leaves when it is waited for, as late as it may."""

    chunk: torch.Tensor
    arrived: list[torch.Tensor]

    def wait(self) -> None:
        self.arrived.append(self.chunk.clone())


def model_of(sizes: list[tuple[int, int]]) -> tuple[Stream, dict[str, torch.Tensor]]:
    """Tensors of so many elements of that dtype, each byte its own."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for number, (elements, dtype) in enumerate(sizes):
        nbytes = elements * DTYPES[dtype].itemsize
        raw = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=random)
        tensors[f"t{number}"] = raw.view(DTYPES[dtype]).view(-1, *[1] * (number % 3))
    slots = [StreamSlot(name, tuple(t.shape), t.dtype, 0) for name, t in tensors.items()]
    return Stream.of(slots), tensors


def chunks_of(stream: Stream, tensors: dict[str, torch.Tensor], size: int) -> list[torch.Tensor]:
    """What a writer sends."""
    arrived: list[torch.Tensor] = []
    writer = Writer(stream, size, CPU, lambda chunk: Sent(chunk, arrived))
    for name, tensor in tensors.items():
        target = writer.place(name)
        target.tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        writer.filled(name, target)
    writer.settle()
    return arrived


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SIZES = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SIZES, st.integers(16, 300))
def test_what_is_written_in_chunks_is_read_from_them_whole_and_once(
    sizes: list[tuple[int, int]], size: int
) -> None:
    stream, tensors = model_of(sizes)
    chunks = chunks_of(stream, tensors, size)
    bounds = list(stream.chunks(size))
    assert [chunk.numel() for chunk in chunks] == [end - first for first, end in bounds]
    assert len(chunks) == -(-stream.nbytes // size)
    memory = torch.empty(stream.nbytes, dtype=torch.uint8)
    for reader in (
        WholeReader(stream, memory, make_views(stream, memory)),
        ChunkReader(stream, size, CPU),
    ):
        got: list[tuple[str, bytes]] = []
        for chunk, (first, end) in zip(chunks, bounds, strict=True):
            reader.memory_for(first, end).copy_(chunk)
            got += [(name, raw(tensor)) for name, tensor in reader.complete(first, end)]
        expected = [(name, raw(tensor)) for name, tensor in tensors.items()]
        if stream.nbytes:
            assert got == expected


@given(SIZES)
def test_tensors_of_a_stream_lie_in_order_aligned_and_apart(sizes: list[tuple[int, int]]) -> None:
    stream, _ = model_of(sizes)
    end = 0
    for slot in stream.slots:
        assert slot.offset % ALIGNMENT == 0 and end <= slot.offset < end + ALIGNMENT
        end = slot.end
    assert stream.nbytes == end


def test_a_writer_holds_one_chunk_and_the_largest_tensor_that_spans_two() -> None:
    stream, _ = model_of([(8, 1), (100, 1), (30, 1)])
    writer = Writer(stream, 256, CPU, lambda chunk: Sent(chunk, []))
    held = writer._chunk.memory.numel() + writer._aside.memory.numel()
    assert held <= 256 + 400 + 2 * 512, "rounded up to 512 each"


@given(SIZES, SIZES)
def test_a_layout_survives_its_encoding(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    layout = StreamLayout((model_of(a)[0], model_of(b)[0]))
    assert StreamLayout.decode(layout.encode()) == layout


@pytest.mark.parametrize("content", [b"", b"{}x", b"[[1]]", b'[[["a",[1],"manual_seed"]]]'])
def test_a_layout_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(RefitError, match="list of tensors cannot be read"):
        StreamLayout.decode(content)
