"""The layout algebra against plain tensor code, for every row of every family and random models."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    Mlp,
    Moe,
    Norms,
    Recurrence,
    Rope,
    Scoring,
    padded_vocab,
    stack,
    vocab_shard,
)
from megatron_policy.converters.registry import FAMILIES
from megatron_policy.converters.rows import (
    Columns,
    GatedQkv,
    GateUp,
    Halves,
    Ignore,
    Joined,
    Qkv,
    Reshaped,
    Row,
    Rows,
    Tied,
    Vocab,
    Whole,
    fill_parts,
    fill_shard,
    pack,
    shard,
    unpack,
    unshard,
)
from megatron_policy.errors import ConversionError


def algebra(row: Row) -> tuple[object, ...]:
    """What the numbers of a row depend on: its kind and its dimensions, not its names."""
    names = ("megatron", "hf", "when", "role", "keeps_dtype", "learnt")
    own = {k: v for k, v in vars(row).items() if k not in names}
    parts = (algebra(v) if hasattr(v, "megatron") else repr(v) for v in own.values())
    return type(row).__name__, len(row.hf), *parts


def is_general(row: Row | Ignore) -> bool:
    """Whether tests here have models with it; those of test_section_rows.py have recurrences and
    gated attention.
    """
    return not isinstance(row, Ignore | GatedQkv) and not issubclass(
        row.part or Attention, Recurrence
    )


TABLES = [[row for row in family.table if is_general(row)] for family in FAMILIES.values()]
DENSE = [rows for rows in TABLES if not any("{expert}" in row.megatron for row in rows)]
UP = Columns("up", ("up",), ("ffn_hidden_size", "hidden_size"), part=Mlp)
DOWN = Rows("fc2.weight", ("f",), ("hidden_size", "ffn_hidden_size"), part=Mlp)
ROWS = [*{algebra(row): row for rows in [[UP], *DENSE] for row in rows}.values()]
"""One for each algebra in the families whose layers are all dense."""
KINDS = {type(row).__name__: [r for r in ROWS if type(r) is type(row)] for row in ROWS}
SIZES = [1, 2, 3, 4, 6, 8]
NARROW = Attention(
    num_attention_heads=4, num_query_groups=2, kv_channels=2, rope=Rope(1e4), window=4
)
WIDE = dataclasses.replace(NARROW, kv_channels=4)


def model(**changes: Any) -> Architecture:
    """A small model; `changes` are of its attention, of its MLPs or of itself. With `moe` all
    layers but the first have experts; `mixers` are those of all layers in place of attention.
    """
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "ffn_hidden_size": 12,
        "vocab_size": 300,
        "max_position_embeddings": 64,
        "layernorm_epsilon": 1e-6,
        "rope": Rope(1e4),
        "tied": False,
    }
    values |= changes
    own = [
        {each.name: values.pop(each.name) for each in fields(kind) if each.name in values}
        for kind in (Attention, Mlp)
    ]
    number, mlp, moe = values.pop("num_layers"), Mlp(**own[1]), values.pop("moe", None)
    feeds = mlp if moe is None else [mlp, *[moe] * (number - 1)]
    mixers = values.pop("mixers", None) or Attention(**own[0])
    layers = stack(number, mixers, feeds, values.pop("norms", Norms.BEFORE))
    return Architecture(layers=layers, **values)


@st.composite
def models(draw: st.DrawFn) -> Architecture:
    """Any dense model; nothing is made to divide by anything but heads by groups."""
    groups = draw(st.integers(1, 8))
    return model(
        num_query_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 6)),
        kv_channels=2 * draw(st.integers(1, 4)),
        hidden_size=draw(st.sampled_from([6, 8, 12, 24])),
        ffn_hidden_size=draw(st.sampled_from([8, 12, 24, 48])),
        vocab_size=draw(st.integers(1, 1500)),
    )


def legal(row: Row, arch: Architecture, size: int) -> bool:
    try:
        row.local_shape(arch, size)
    except ConversionError:
        return False
    return True


def largest(row: Row, arch: Architecture, most: int) -> int:
    """The largest legal size of `SIZES` up to `most`; 1 always is."""
    return max(size for size in SIZES if size <= most and legal(row, arch, size))


def numbered(row: Row, arch: Architecture, start: int = 1) -> list[torch.Tensor]:
    """HF tensors in which no two elements are equal and none is zero."""
    parts = []
    for shape in row.hf_shapes(arch):
        count = torch.Size(shape).numel()
        parts.append(torch.arange(start, start + count).view(shape))
        start += count
    return parts


def megatron_shard(
    row: Row, arch: Architecture, parts: list[torch.Tensor], rank: int, size: int
) -> torch.Tensor:
    """What Megatron-Core holds on a rank, written out with cat, chunk and loops."""
    match row:
        case Reshaped():
            return parts[0].reshape(row.local_shape(arch, size))
        case Halves():
            first, second = parts[0].chunk(2, 1)
            return torch.cat([second, first], 1)
        case Whole():
            return parts[0]
        case Joined():
            rows = [shape[0] for shape in row.of.hf_shapes(arch)]
            return megatron_shard(row.of, arch, list(parts[0].split(rows)), rank, size)
        case Columns():
            return parts[0].chunk(size, 0)[rank]
        case Rows():
            return parts[0].chunk(size, 1)[rank]
        case GateUp():
            return torch.cat([part.chunk(size, 0)[rank] for part in parts])
        case Vocab() | Tied():
            rows = padded_vocab(arch.vocab_size, size) - arch.vocab_size
            padding = parts[0].new_zeros(rows, parts[0].shape[1])
            return torch.cat([parts[0], padding]).chunk(size, 0)[rank]
        case Qkv():
            query, key, value = (part.split(arch.mixer.kv_channels) for part in parts)
            per, heads = arch.mixer.heads_per_group, []
            for group in range(arch.mixer.num_query_groups):
                heads += [*query[group * per : (group + 1) * per], key[group], value[group]]
            return torch.cat(heads).chunk(size, 0)[rank]
    raise AssertionError(f"no oracle for {row}")


every_kind = pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
thorough = settings(max_examples=25, deadline=None, derandomize=True)


@every_kind
@thorough
@given(data=st.data(), arch=models(), most=st.sampled_from(SIZES))
def test_unpack_inverts_pack_and_unshard_inverts_shard(
    rows: list[Row], data: st.DataObject, arch: Architecture, most: int
) -> None:
    row = data.draw(st.sampled_from(rows))
    parts = numbered(row, arch)
    whole = pack(row, arch, parts)
    back = unpack(row, arch, whole)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))
    size = largest(row, arch, most)
    shards = [shard(row, arch, whole, rank, size) for rank in range(size)]
    assert torch.equal(unshard(row, arch, shards), whole)


@every_kind
@thorough
@given(data=st.data(), arch=models(), most=st.sampled_from(SIZES))
def test_a_shard_is_what_megatron_holds(
    rows: list[Row], data: st.DataObject, arch: Architecture, most: int
) -> None:
    row = data.draw(st.sampled_from(rows))
    size = largest(row, arch, most)
    parts = numbered(row, arch)
    for rank in range(size):
        held = torch.full(row.local_shape(arch, size), -1)
        fill_shard(row, arch, held, parts, rank, size)
        assert torch.equal(held, megatron_shard(row, arch, parts, rank, size))


@every_kind
@thorough
@given(data=st.data(), arch=models(), most=st.sampled_from(SIZES))
def test_every_hf_element_is_in_one_shard_and_every_shard_element_is_filled(
    rows: list[Row], data: st.DataObject, arch: Architecture, most: int
) -> None:
    row = data.draw(st.sampled_from(rows))
    size = largest(row, arch, most)
    uses = [torch.zeros(shape, dtype=torch.long) for shape in row.hf_shapes(arch)]
    for rank in range(size):
        filled = torch.zeros(row.local_shape(arch, size), dtype=torch.long)
        for block in row.blocks(arch, rank, size):
            uses[block.part].view(block.hf_view)[block.hf_index] += 1
            filled.view(block.shard_view)[block.shard_index] += 1
        real = filled.shape[0] - row.pad_rows(arch, rank, size)
        assert (filled[:real] == 1).all() and (filled[real:] == 0).all()
    replicas = size if isinstance(row, Whole) else 1
    assert all((count == replicas).all() for count in uses)


def test_more_ranks_than_groups_cut_inside_a_group_and_inside_a_head() -> None:
    row = Qkv("qkv", ("q", "k", "v"), ())
    arch = model(num_attention_heads=4, num_query_groups=1, kv_channels=2)  # 12 fused rows
    parts = [torch.arange(8), torch.arange(8, 10), torch.arange(10, 12)]
    held = [shard(row, arch, pack(row, arch, parts), rank, 4).tolist() for rank in range(4)]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@thorough
@given(arch=models(), most=st.sampled_from(SIZES), tail=st.sampled_from([(), ("hidden_size",)]))
def test_heads_by_group_and_by_ranges_of_rows_are_the_same_shard(
    arch: Architecture, most: int, tail: tuple[str, ...]
) -> None:
    row = Qkv("qkv", ("q", "k", "v"), tail)
    size, parts = largest(row, arch, most), numbered(row, arch)
    for rank in range(size):
        by_rows = torch.full(row.local_shape(arch, size), -1)
        for block in row.cuts(arch, rank, size):
            taken = parts[block.part].view(block.hf_view)[block.hf_index]
            by_rows.view(block.shard_view)[block.shard_index] = taken
        held = torch.empty_like(by_rows)
        fill_shard(row, arch, held, parts, rank, size)
        assert torch.equal(held, by_rows)


@thorough
@given(vocab=st.integers(1, 3000), tp=st.sampled_from(SIZES))
def test_the_shards_of_a_vocabulary_are_its_entries_in_order_and_then_padding(
    vocab: int, tp: int
) -> None:
    whole = [*range(vocab), *[None] * (padded_vocab(vocab, tp) - vocab)]
    rows = len(whole) // tp
    for rank in range(tp):
        first, real, held = vocab_shard(vocab, rank, tp)
        assert [*range(first, first + real), *[None] * (held - real)] == whole[rank * rows :][:rows]


def test_few_blocks_describe_a_shard() -> None:
    arch = model(num_attention_heads=32, num_query_groups=8, kv_channels=4)
    weight = Qkv("qkv", ("q", "k", "v"), ("hidden_size",))
    assert [len(weight.blocks(arch, 0, size)) for size in (1, 2, 4, 8)] == [3, 3, 3, 3]
    assert all(len(weight.blocks(arch, rank, 16)) <= 3 for rank in range(16))


def test_filling_a_shard_casts_writes_into_the_parameter_and_clears_its_padding() -> None:
    row, arch = Vocab("e", ("e",), ("vocab_size", "hidden_size")), model(vocab_size=130)
    source = torch.randn(130, 8, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.full(row.local_shape(arch, 2), torch.nan))
    fill_shard(row, arch, parameter, [source], 1, 2)
    assert torch.equal(parameter[:2], source[128:].float())
    assert row.pad_rows(arch, 1, 2) == 126 and (parameter[2:] == 0).all()
    assert parameter.requires_grad and parameter.is_leaf


def test_filling_the_hf_tensors_casts_back_to_the_same_bits_and_leaves_the_rest_alone() -> None:
    row, arch = Rows("o", ("o",), ("hidden_size", "query_size"), part=Attention), model()
    source = torch.randn(8, 8, dtype=torch.bfloat16)
    target = torch.full((8, 8), torch.nan, dtype=torch.bfloat16)
    fill_parts(row, arch, [target], shard(row, arch, source.float(), 1, 2), 1, 2)
    assert torch.equal(target[:, 4:], source[:, 4:]) and target[:, :4].isnan().all()


def test_a_rank_whose_vocabulary_is_all_padding_holds_zeros() -> None:
    row, arch = Vocab("e", ("e",), ("vocab_size", "hidden_size")), model(vocab_size=100)
    held = shard(row, arch, torch.ones(row.local_shape(arch, 1)), 3, 4)
    assert row.blocks(arch, 3, 4) == () and row.pad_rows(arch, 3, 4) == 128
    assert held.shape == (128, 8) and (held == 0).all()


@pytest.mark.parametrize(
    ("row", "size", "said"),
    [
        (DOWN, 5, "fc2.weight: 12 "),
        (GateUp("fc1.weight", ("g", "u"), ("ffn_hidden_size",), part=Mlp), 8, "fc1.weight: 12 "),
        (Qkv("qkv.weight", ("q", "k", "v"), ()), 5, "qkv.weight: 16 "),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_sizes_that_do(
    row: Row, size: int, said: str
) -> None:
    with pytest.raises(ConversionError) as caught:
        row.local_shape(model(), size)
    assert said in str(caught.value) and "[1, 2, " in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\)"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": 10.0}, "vocab_size"),
        ({"kv_channels": 3}, "even head size"),
        ({"num_layers": 0}, "num_layers"),
        ({"mixers": [NARROW]}, "2 layers, but names the kind of 1, not of every layer"),
        ({"mixers": [NARROW, WIDE]}, "Attention parts of different sizes"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        model(**changes)


def test_models_with_their_windows_on_other_layers_differ() -> None:
    sees_all = dataclasses.replace(NARROW, window=None)
    assert model(mixers=[sees_all, NARROW]) != model(mixers=[NARROW, sees_all])


@pytest.mark.parametrize(
    ("condition", "holds"),
    [("", True), ("qkv_bias", True), ("!qkv_bias", False), ("qkv_bias !proj_bias", True)],
)
def test_a_condition_is_an_attribute_or_its_negation(condition: str, holds: bool) -> None:
    assert model(qkv_bias=True).holds(condition, Attention, 1) is holds


@pytest.mark.parametrize(("condition", "holds"), [("", True), ("tied", False), ("!tied", True)])
def test_a_condition_without_a_part_is_about_the_model(condition: str, holds: bool) -> None:
    assert model().holds(condition) is holds


def test_rows_of_a_part_are_those_of_the_layers_that_have_it() -> None:
    moe = Moe(experts=4, chosen=2, ffn_hidden_size=6, scoring=Scoring.SOFTMAX)
    held = [model(moe=moe).holds("", kind, layer) for kind in (Mlp, Moe) for layer in (0, 1)]
    assert held == [True, False, False, True]
