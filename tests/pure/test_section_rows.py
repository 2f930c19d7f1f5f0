"""Rows of unequal sections and of gated attention, against plain tensor code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.adapters.rows import GatedQkvParts, QkvParts
from megatron_policy.adapters.table import number_outputs
from megatron_policy.checkpoint.local_shards import cut_slices
from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Mamba2,
    Moe,
    Rope,
    Scoring,
    ShortConvolution,
    delta_net,
    mamba2,
    short_convolution,
)
from megatron_policy.converters.rows import (
    GatedQkv,
    Qkv,
    Row,
    Sections,
    fill_shard,
    pack,
    shard,
    unpack,
    unshard,
)
from megatron_policy.converters.rows.expert_rows import StackedGateAboveUp, StackedInputs
from megatron_policy.converters.rows.shards import copies_of, is_split, split_dimension
from megatron_policy.errors import ConversionError
from tests.pure.test_rows import SIZES, largest, legal, model, numbered, thorough

QKV = (delta_net.QUERY, delta_net.KEY, delta_net.VALUE)
XBC = (mamba2.INPUT, mamba2.INTO, mamba2.OUT)
DELTA: dict[str, Any] = {"part": DeltaNet}
GATED = GatedQkv("qkv", ("q", "k", "v"), ("hidden_size",))
ROWS: dict[str, Row] = {
    "gated attention": GATED,
    "its biases": GatedQkv("qkv.bias", ("q", "k", "v"), ()),
    "a delta net by key heads": Sections(
        "in_proj",
        ("qkvz", "ba"),
        ((*QKV, delta_net.GATE), (delta_net.BETA, delta_net.ALPHA)),
        ("hidden_size",),
        by="num_key_heads",
        **DELTA,
    ),
    "a delta net by sections": Sections(
        "in_proj",
        ("qkv", "z", "b", "a"),
        (QKV, (delta_net.GATE,), (delta_net.BETA,), (delta_net.ALPHA,)),
        ("hidden_size",),
        **DELTA,
    ),
    "its convolution": Sections("conv1d", ("conv1d",), (QKV,), (1, "taps"), **DELTA),
    "Mamba2": Sections(
        "in_proj",
        ("in_proj",),
        ((mamba2.GATE, *XBC, mamba2.STEP),),
        ("hidden_size",),
        part=Mamba2,
    ),
    "its convolution's bias": Sections("conv1d.bias", ("bias",), (XBC,), (), part=Mamba2),
    "a short convolution": Sections(
        "in_proj",
        ("in_proj",),
        ((short_convolution.INTO, short_convolution.OUT, short_convolution.INPUT),),
        ("hidden_size",),
        part=ShortConvolution,
    ),
}
PROJECTIONS = [name for name, row in ROWS.items() if row.tail == ("hidden_size",)]


def hybrid(groups: int, per: int, head: int, other: int, taps: int = 3) -> Architecture:
    """A model with all of these parts: `groups` of `per` heads of `head` channels, with keys or
    states of `other` channels.
    """
    attention = Attention(
        num_attention_heads=groups * per,
        num_query_groups=groups,
        kv_channels=2 * head,
        rope=Rope(1e4),
        attention_output_gate=True,
    )
    delta = DeltaNet(
        num_key_heads=groups,
        num_value_heads=groups * per,
        key_head_dim=other,
        value_head_dim=head,
        taps=taps,
    )
    mamba = Mamba2(
        num_heads=groups * per, head_dim=head, groups=groups, state_size=other, taps=taps
    )
    short = ShortConvolution(channels=6, taps=taps)
    return model(hidden_size=6, num_layers=4, mixers=[attention, delta, mamba, short])


@st.composite
def hybrids(draw: st.DrawFn) -> Architecture:
    numbers = st.integers(1, 4)
    return hybrid(draw(st.integers(1, 8)), draw(numbers), draw(numbers), draw(numbers))


def sections_of(row: Row, arch: Architecture, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sections of the HF tensors in Megatron-Core's order, each with its rows by heads."""
    found = []
    for part, sections in zip(parts, row.sections, strict=True):
        sizes = [arch.shape(each[:2], row.part) for each in sections]
        if row.by:
            (heads,) = arch.shape((row.by,), row.part)
            shares = [count * rows // heads for count, rows in sizes]
            by_head = part.unflatten(0, (heads, -1)).split(shares, 1)
            found += [each.flatten(0, 1) for each in by_head]
        else:
            found += part.split([count * rows for count, rows in sizes])
    return found


def megatron_shard(
    row: Row, arch: Architecture, parts: list[torch.Tensor], rank: int, size: int
) -> torch.Tensor:
    """What Megatron-Core holds on a rank."""
    if isinstance(row, Sections):
        return torch.cat([each.chunk(size)[rank] for each in sections_of(row, arch, parts)])
    attention = arch.find_part(Attention)
    query, key, value = (part.split(attention.kv_channels) for part in parts)
    per, heads = attention.heads_per_group, []
    for group in range(attention.num_query_groups):
        own = query[2 * group * per : 2 * (group + 1) * per]
        heads += [*own[::2], *own[1::2], key[group], value[group]]
    return torch.cat(heads).chunk(size)[rank]


every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@every_row
@thorough
@given(arch=hybrids(), most=st.sampled_from(SIZES))
def test_shards_are_what_megatron_holds_and_come_back(
    row: Row, arch: Architecture, most: int
) -> None:
    size, parts = largest(row, arch, most), numbered(row, arch)
    whole = pack(row, arch, parts)
    back = unpack(row, arch, whole)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))
    shards = [shard(row, arch, whole, rank, size) for rank in range(size)]
    assert torch.equal(unshard(row, arch, shards), whole)
    for rank in range(size):
        held = torch.full(row.local_shape(arch, size), -1)
        fill_shard(row, arch, held, parts, rank, size)
        assert torch.equal(held, megatron_shard(row, arch, parts, rank, size))
        assert torch.equal(held, shards[rank])


@every_row
@thorough
@given(arch=hybrids(), most=st.sampled_from(SIZES))
def test_every_element_of_a_tensor_is_in_one_shard(row: Row, arch: Architecture, most: int) -> None:
    size = largest(row, arch, most)
    uses = [torch.zeros(shape, dtype=torch.long) for shape in row.hf_shapes(arch)]
    for rank in range(size):
        filled = torch.zeros(row.local_shape(arch, size), dtype=torch.long)
        for block in row.blocks(arch, rank, size):
            uses[block.part].view(block.hf_view)[block.hf_index] += 1
            filled.view(block.shard_view)[block.shard_index] += 1
        assert (filled == 1).all()
    assert all((count == 1).all() for count in uses)
    assert copies_of(row, arch, size) == ((0, 1),) * size
    assert is_split(row, arch, size) is (size > 1)


@every_row
@thorough
@given(data=st.data(), arch=hybrids(), most=st.sampled_from(SIZES))
def test_a_slice_of_a_shard_is_a_box_of_the_whole(
    row: Row, data: st.DataObject, arch: Architecture, most: int
) -> None:
    size = largest(row, arch, most)
    whole = pack(row, arch, numbered(row, arch))
    seen = torch.zeros_like(whole)
    for rank in range(size):
        flat = shard(row, arch, whole, rank, size).flatten()
        cut = data.draw(st.integers(0, flat.numel()))
        for ends in pairwise((0, cut, flat.numel())):
            for piece in cut_slices(row, arch, rank, size, *ends):
                box = tuple(slice(a, a + n) for a, n in zip(piece.origin, piece.sizes, strict=True))
                held = flat[piece.own : piece.own + piece.elements]
                assert torch.equal(held.view(piece.sizes), whole[box])
                seen[box] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    "name", [name for name in ROWS if "bias" not in name and "conv" not in name]
)
@thorough
@given(arch=hybrids(), most=st.sampled_from(SIZES))
def test_the_outputs_of_a_shard_are_numbered_by_tensor_and_row(
    name: str, arch: Architecture, most: int
) -> None:
    row = ROWS[name]
    size, shapes = largest(row, arch, most), row.hf_shapes(arch)
    numbers = [
        torch.stack([torch.full((rows,), part), torch.arange(rows)], 1)
        for part, (rows, *_) in enumerate(shapes)
    ]
    for rank in range(size):
        found = number_outputs(row, arch, rank, size)
        assert torch.equal(found, megatron_shard(row, arch, numbers, rank, size))


@pytest.mark.parametrize(
    ("kind", "fused"),
    [(QkvParts, Qkv("qkv", GATED.hf, GATED.tail)), (GatedQkvParts, GATED)],
    ids=["attention", "gated attention"],
)
@thorough
@given(
    arch=hybrids(),
    parts=st.sampled_from([(0,), (1,), (2,), (0, 2), (0, 1), (1, 2)]),
    most=st.sampled_from(SIZES),
)
def test_some_parts_of_attention_are_the_rows_of_these_parts(
    kind: type[QkvParts | GatedQkvParts],
    fused: Row,
    arch: Architecture,
    parts: tuple[int, ...],
    most: int,
) -> None:
    row = kind("b", ("b",) * len(parts), parts, (3,))
    size, tensors = largest(row, arch, most), numbered(row, arch)
    for rank in range(size):
        held = shard(row, arch, pack(row, arch, tensors), rank, size)
        numbers = number_outputs(row, arch, rank, size)
        expected = [tensors[part][at] for part, at in numbers.tolist()]
        assert torch.equal(held, torch.stack(expected))
        whole = number_outputs(fused, arch, rank, size).tolist()
        of_parts = [[parts.index(part), at] for part, at in whole if part in parts]
        assert numbers.tolist() == of_parts


def test_gated_attention_has_a_groups_queries_then_its_gates() -> None:
    arch = hybrid(groups=1, per=2, head=1, other=1)  # heads of 2 channels
    row = GatedQkv("qkv", ("q", "k", "v"), ())
    parts = [torch.arange(8), torch.arange(8, 10), torch.arange(10, 12)]
    whole = pack(row, arch, parts)
    assert whole.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    assert shard(row, arch, whole, 2, 4).tolist() == [6, 7, 8]  # inside a group


def test_a_delta_net_by_key_heads_is_put_section_by_section() -> None:
    arch = hybrid(groups=2, per=2, head=1, other=1)
    row = ROWS["a delta net by key heads"]
    parts = [part[:, :1].flatten() // 6 for part in numbered(row, arch, start=0)]
    # Of each key head: q, k, two v, two z; then two b, two a.
    assert [part.tolist() for part in parts] == [[*range(12)], [*range(12, 20)]]
    whole = pack(row, arch, numbered(row, arch, start=0))[:, 0] // 6
    assert whole.tolist() == [0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 16, 17, 14, 15, 18, 19]
    second = shard(row, arch, pack(row, arch, numbered(row, arch, start=0)), 1, 2)[:, 0] // 6
    assert second.tolist() == [6, 7, 8, 9, 10, 11, 16, 17, 18, 19]


def test_experts_that_are_stacked_as_they_are_come_back_from_shards() -> None:
    moe = Moe(experts=3, chosen=2, ffn_hidden_size=12, scoring=Scoring.SOFTMAX)
    arch, size = model(moe=moe), 2
    stack = torch.arange(3 * 24 * 8).view(3, 24, 8)
    row = StackedGateAboveUp("fc1", ("input",), ("hidden_size",), expert=1)
    assert row.hf_shapes(arch) == (stack.shape,)
    for rank in range(size):
        gate, up = (half.chunk(size)[rank] for half in stack[1].chunk(2))
        held = torch.empty(row.local_shape(arch, size), dtype=torch.long)
        fill_shard(row, arch, held, [stack], rank, size)
        assert torch.equal(held, torch.cat([gate, up]))
    outputs = StackedInputs("fc2", ("output",), ("hidden_size", "ffn_hidden_size"), expert=2)
    stack = torch.arange(3 * 8 * 12).view(3, 8, 12)
    assert outputs.hf_shapes(arch) == (stack.shape,)
    for rank in range(size):
        held = torch.empty(outputs.local_shape(arch, size), dtype=torch.long)
        fill_shard(outputs, arch, held, [stack], rank, size)
        assert torch.equal(held, stack[2].chunk(size, 1)[rank])


def test_sections_are_split_along_their_rows_by_ranks_that_divide_their_heads() -> None:
    arch = hybrid(groups=2, per=3, head=1, other=4)
    for name, row in ROWS.items():
        assert split_dimension(row, arch) == 0, name
    assert [size for size in SIZES if legal(ROWS["Mamba2"], arch, size)] == [1, 2]
    with pytest.raises(ConversionError, match="in_proj: 8 cannot be split over 3"):
        ROWS["Mamba2"].local_shape(arch, 3)
