"""Parameters that ranks hold as consecutive elements of the flat one, against numbered tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.checkpoint.local_shards import cut_slices
from megatron_policy.converters.architecture import Mlp
from megatron_policy.converters.rows import GateUp, Qkv, Row
from megatron_policy.converters.rows.blocks import Within, fill_parts, fill_shard, pack
from megatron_policy.converters.rows.shards import is_split, unpadded_shape
from megatron_policy.engines.hugging_face.table import RangeRow
from megatron_policy.weights.geometry import segments
from tests.pure.test_checkpoint_slices import architecture

ARCH = architecture(2)
QKV = Qkv("qkv", ("q", "k", "v"), ("hidden_size",))
GATE_UP = GateUp("gate_up", ("g", "u"), ("ffn_hidden_size", "hidden_size"), part=Mlp)
CASES = {
    "alone": (((5, 3),), None),
    "three dimensions": (((4, 3, 2),), None),
    "two HF tensors": (((4, 3), (2, 3)), None),
    "queries of a fused parameter": ((QKV.hf_shapes(ARCH)[0],), Within(QKV, (0,))),
    "values of a fused parameter": ((QKV.hf_shapes(ARCH)[2],), Within(QKV, (2,))),
    "gate and up": (GATE_UP.hf_shapes(ARCH), Within(GATE_UP, (0, 1))),
}


def drawn(data: st.DataObject, name: str) -> RangeRow:
    """Cut anywhere: ranks can have nothing, and one of them all."""
    parts, of = CASES[name]
    elements = sum(torch.Size(part).numel() for part in parts)
    cuts = data.draw(st.lists(st.integers(0, elements), min_size=1, max_size=3).map(sorted))
    flat = tuple(pairwise((0, *cuts, elements)))
    return RangeRow("", ("",) * len(parts), parts=parts, dim=None, of=of, flat=flat)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(st.data())
def test_a_range_is_filled_sent_and_saved_as_those_elements(name: str, data) -> None:
    row = drawn(data, name)
    size = len(row.flat)
    parts = [torch.rand(shape) for shape in row.hf_shapes(ARCH)]
    whole = pack(row, ARCH, parts)
    assert torch.equal(whole.flatten(), torch.cat([part.flatten() for part in parts]))
    assert is_split(row, ARCH, size)
    saved: Row = row if row.of is None else row.of.row
    numbered = dict(zip(_numbers(row), parts, strict=True))
    everything = [numbered.get(n, torch.zeros(s)) for n, s in enumerate(saved.hf_shapes(ARCH))]
    expected = pack(saved, ARCH, everything).view(unpadded_shape(saved, ARCH))
    found = torch.zeros_like(expected)
    back = [torch.zeros(shape) for shape in row.hf_shapes(ARCH)]
    sent = [0] * len(parts)
    for rank, (first, last) in enumerate(row.flat):
        own = torch.empty(last - first)
        fill_shard(row, ARCH, own, parts, rank, size)
        assert torch.equal(own, whole.flatten()[first:last])
        fill_parts(row, ARCH, back, own, rank, size)
        for piece in cut_slices(row, ARCH, rank, size, 0, last - first):
            box = tuple(slice(a, a + n) for a, n in zip(piece.origin, piece.sizes, strict=True))
            count = piece.elements
            found[box] = own[piece.own : piece.own + count].view(piece.sizes)
        for part in range(len(parts)):
            sent[part] += sum(each.elements for each in segments(row, ARCH, part, rank, size))
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    assert sent == [part.numel() for part in parts]


def _numbers(row: RangeRow) -> tuple[int, ...]:
    """Of the row's HF tensors in the parameter that checkpoints have."""
    return tuple(range(len(row.parts))) if row.of is None else row.of.parts
