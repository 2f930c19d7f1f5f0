"""The closed world: inventories of both sides, what chunks hold, errors that name what is off."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.mismatch import SHOWN
from megatron_policy.converters.registry import FAMILIES, Family
from megatron_policy.converters.rows import Ignore, Role, Row, Whole, fill_shard
from megatron_policy.converters.rows.blocks import blocks_of
from megatron_policy.converters.table import Entry, Table, bind
from megatron_policy.errors import ConversionError
from megatron_policy.parallel.topology import LayerSplit
from megatron_policy.weights.load import canonical_name
from tests.families import SAMPLES


def switches(family: str) -> dict[str, bool]:
    """The fields that are true or false of those under which every row of the family applies."""
    return {n: value for n, value in SAMPLES[family].full.items() if isinstance(value, bool)}


def raw(family: str, layers: int = 3, **changes: Any) -> dict[str, Any]:
    """The fields of a small config, under which every row of the family applies."""
    samples = SAMPLES[family]
    fields = {
        "model_type": family,
        "architectures": list(FAMILIES[family].hf_architectures),
        "num_hidden_layers": layers,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 200,
        "max_position_embeddings": 64,
        samples.epsilon: 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        **({"layer_types": ["full_attention"] * layers} if samples.layer_types else {}),
        **samples.take_turns(layers),
        **samples.tiny,
        **samples.own,
        **samples.full,
        **changes,
    }
    if "vision_config" not in (found := samples.surround(fields)):
        return found
    return found | {"shell": {"visual.patch_embed.proj.weight": [6, 4], "visual.norm.bias": [4]}}


def list_rows(family: str) -> tuple[Row | Ignore, ...]:
    """All rows of the family, for the decoder of its samples if models of it have several."""
    return FAMILIES[family].list_rows(Fields(raw(family)))


def small(family: str = "qwen2", layers: int = 3, **changes: Any) -> Table:
    return bound(raw(family, layers, **changes))


def bound(fields: dict[str, Any], family: Family | None = None) -> Table:
    """With all layers for multi-token prediction."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    decoder = fields.get("text_config", fields)
    return bind(fields, family, sum(decoder.get(name, 0) for name in names))


def check(
    table: Table, shapes: dict[str, Any], dtypes: dict[str, torch.dtype] | None = None
) -> None:
    """Check an inventory of bf16 tensors, but for those with another of `dtypes`."""
    table.check_hf(shapes, dict.fromkeys(shapes, torch.bfloat16) | (dtypes or {}))


def without(family: str, row: Row | Ignore) -> Family:
    whole = FAMILIES[family]
    rows = tuple(other for other in list_rows(family) if other != row)
    return replace(whole, find_rows=lambda fields: whole.list_rows(fields) and rows)


def rows_in_use() -> dict[tuple[str, bool], list[Row]]:
    """Each row once, by the first family whose table has it and a config to which it applies."""
    first: dict[tuple[bool, Row], str] = {}
    for tied in (False, True):
        for family in [f for f, each in SAMPLES.items() if not (tied and each.untied)]:
            table = small(family, tie_word_embeddings=tied)
            for row in list_rows(family):
                if not isinstance(row, Ignore) and entries_of(row, table):
                    first.setdefault((tied, row), family)
    by_family: dict[tuple[str, bool], list[Row]] = {}
    for (tied, row), family in first.items():
        by_family.setdefault((family, tied), []).append(row)
    return by_family


def entries_of(row: Row, table: Table) -> list[Entry]:
    """The row's entries; each expert has one of its own where HF stacks experts."""

    def key(of: Row) -> tuple[object, ...]:
        return of.megatron, of.hf, of.part, of.when

    return [entry for entry in table.entries if key(entry.row) == key(row)]


ROWS = rows_in_use()
of_each_family = pytest.mark.parametrize(("family", "tied"), ROWS)


@of_each_family
def test_removing_any_row_names_the_parameter_nobody_fills(family: str, tied: bool) -> None:
    fields = raw(family, tie_word_embeddings=tied)
    whole = bound(fields)
    for row in ROWS[family, tied]:
        # A copy is on a later stage only.
        chunk = {"layers": range(3), "first": row.owns, "last": True}
        built = {
            entry.megatron: entry.row.local_shape(whole.architecture, 2)
            for entry in whole.entries_of(**chunk)
        }
        poorer = bound(fields, without(family, row))
        with pytest.raises(ConversionError) as caught:
            poorer.check_megatron(built, 2, poorer.entries_of(**chunk))
        entry = entries_of(row, whole)[0]
        assert f"unexpected: {entry.megatron} [" in str(caught.value)


@of_each_family
def test_removing_any_row_names_the_hf_tensors_nobody_uses(family: str, tied: bool) -> None:
    fields = raw(family, tie_word_embeddings=tied)
    whole = bound(fields)
    for row in ROWS[family, tied]:
        poorer, tensors = bound(fields, without(family, row)), whole.hf_shapes()
        if not row.owns:
            check(poorer, tensors)  # its tensors are another row's
            continue
        with pytest.raises(ConversionError) as caught:
            check(poorer, tensors)
        for name in entries_of(row, whole)[0].hf:
            assert f"unexpected: {name} [" in str(caught.value), row.megatron


DTYPES = (torch.int32, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.float64)


@of_each_family
def test_renaming_reshaping_or_casting_any_hf_tensor_names_it(family: str, tied: bool) -> None:
    table = small(family, tie_word_embeddings=tied)
    shapes = table.hf_shapes()
    fed = {name: entry.megatron for entry in table.exported() for name in entry.hf}
    owned = [row for row in ROWS[family, tied] if row.owns]
    names = [name for row in owned for name in entries_of(row, table)[0].hf]
    for name, dtype in zip(names, cycle(DTYPES)):
        shape = list(shapes[name])
        with pytest.raises(ConversionError) as caught:
            check(table, {k: v for k, v in shapes.items() if k != name} | {f"{name}x": shape})
        assert f"missing: {name} {shape}, which feeds {fed[name]} (" in str(caught.value)
        assert f"unexpected: {name}x {shape}" in str(caught.value)
        assert f"misspelt {name}?" in str(caught.value)
        with pytest.raises(ConversionError) as caught:
            check(table, shapes | {name: (*shape, 1)})
        said = f"misshapen: {name} is {[*shape, 1]}, must be {shape}; it feeds"
        assert said in str(caught.value)
        with pytest.raises(ConversionError) as caught:
            check(table, shapes, {name: dtype})
        said = str(caught.value)
        assert f"dtype: {name} is {str(dtype).removeprefix('torch.')}; it feeds" in said
        quantised = "is quantised to fp8 (e4m3): 1 tensors"
        other = "Dequantise or convert the checkpoint to float32 or bfloat16 or float16"
        assert (quantised if dtype == torch.float8_e4m3fn else other) in said
        assert said.count("dtype: ") == 1


def test_hf_tensors_may_be_any_mixture_of_plain_floats() -> None:
    table, kinds = small(), [torch.float32, torch.bfloat16, torch.float16]
    check(table, table.hf_shapes(), {n: kinds[i % 3] for i, n in enumerate(table.hf_shapes())})


def test_a_quantised_checkpoint_is_told_so_rather_than_that_its_scales_are_unknown() -> None:
    table = small()
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ConversionError, match=r"fp8 \(e4m3\).*block scales in 1") as caught:
        check(table, table.hf_shapes() | {f"{name}_scale_inv": (1,)}, {name: torch.float8_e4m3fn})
    assert "unexpected" not in str(caught.value)
    assert "FineGrainedFP8Config(dequantize=True)" in str(caught.value)
    packed = {k: v for k, v in table.hf_shapes().items() if k != name}
    packed[name.replace("weight", "qweight")] = (2, 16)
    with pytest.raises(ConversionError, match=r"gptq or awq \(qweight\): 1 tensors"):
        check(table, packed)


def test_adding_any_hf_tensor_names_it() -> None:
    table = small()
    for name in ("model.layers.3.mlp.up_proj.weight", "lm_head.bias", "score.weight"):
        with pytest.raises(ConversionError) as caught:
            check(table, table.hf_shapes() | {name: (1,)})
        assert f"unexpected: {name} [1]" in str(caught.value)


def test_all_problems_are_listed_at_once_and_a_flood_is_counted() -> None:
    table = small("llama", layers=60)
    found = {k: v for k, v in table.hf_shapes().items() if not k.endswith("up_proj.weight")}
    found |= {"one.weight": (1,), "model.norm.weight": (3,)}
    with pytest.raises(ConversionError) as caught:
        check(table, found)
    said = str(caught.value)
    assert said.count("missing: ") == SHOWN and f"and {60 - SHOWN} more missing" in said
    assert "unexpected: one.weight" in said and "misshapen: model.norm.weight" in said


def test_a_tensor_that_may_be_ignored_may_be_there_or_not() -> None:
    table = small("llama", tie_word_embeddings=True)
    extra = {"lm_head.weight": (200, 16), "model.layers.1.self_attn.rotary_emb.inv_freq": (2,)}
    check(table, table.hf_shapes())
    check(table, table.hf_shapes() | extra)
    check(table, table.hf_shapes() | extra, dict.fromkeys(extra, torch.int32))
    assert all(table.ignored[name].why for name in extra)
    assert table.copies() == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(ConversionError, match=r"missing: lm_head\.weight"):
        check(small("llama"), table.hf_shapes())
    (copy,) = (row for row in FAMILIES["llama"].table if getattr(row, "equals", ""))
    with pytest.raises(ConversionError, match=r"unexpected: lm_head\.weight"):
        fields = raw("llama", tie_word_embeddings=True)
        check(bind(fields, without("llama", copy)), table.hf_shapes() | extra)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "split", [LayerSplit.of(4, 2), LayerSplit.of(4, 2, 2), LayerSplit.of(4, 1)]
)
def test_the_chunks_of_a_pipeline_hold_every_entry_and_copies_only_where_needed(
    tied: bool, split: LayerSplit
) -> None:
    table = small(layers=4, tie_word_embeddings=tied)
    chunks = [(pp, vp) for pp, stage in enumerate(split.stages) for vp in range(len(stage))]
    held = [
        entry
        for pp, vp in chunks
        for entry in table.entries_of(
            split.stages[pp][vp],
            first=(pp, vp) == (0, 0),
            last=(pp, vp) == (len(split.stages) - 1, len(split.stages[0]) - 1),
        )
    ]
    copies = 1 if tied and len(chunks) > 1 else 0
    exported = table.exported()
    assert len(held) == len(exported) + copies and set(exported) <= set(held)
    assert {entry.megatron for entry in held} - {e.megatron for e in exported} == (
        {"output_layer.weight"} if copies else set()
    )
    assert list(table.hf_shapes()) == [name for entry in exported for name in entry.hf]


@pytest.mark.parametrize(
    ("local", "offset", "canonical"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", 6, "decoder.layers.7.mlp.linear_fc2.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            2,
            "decoder.layers.2.input_layernorm.weight",
        ),
        (
            "module.module.decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            0,
            "decoder.layers.0.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.0.mixer.in_proj.layer_norm_weight",
            1,
            "decoder.layers.1.input_layernorm.weight",
        ),
        ("decoder.final_layernorm.weight", 6, "decoder.final_layernorm.weight"),
        ("module.output_layer.weight", 6, "output_layer.weight"),
    ],
)
def test_both_specs_and_any_offset_lead_to_one_name(
    local: str, offset: int, canonical: str
) -> None:
    assert canonical_name(local, offset) == canonical


def test_a_built_model_of_another_tensor_parallel_size_is_refused_with_both_shapes() -> None:
    table = small()
    entries = table.entries_of(range(3), first=True, last=True)
    shapes = {e.megatron: e.row.local_shape(table.architecture, 1) for e in entries}
    table.check_megatron(shapes, 1, entries)
    with pytest.raises(ConversionError) as caught:
        table.check_megatron(shapes, 2, entries)
    assert "(tp 2)" in str(caught.value)
    assert "linear_fc1.weight is [48, 16], must be [24, 16]" in str(caught.value)
    assert "mlp.gate_proj.weight + model.layers.0.mlp.up_proj.weight (GateUp row)" in str(
        caught.value
    )


def test_a_table_that_uses_a_tensor_twice_is_refused() -> None:
    qwen = FAMILIES["qwen2"]
    norm = Whole("decoder.second_norm.weight", ("model.norm.weight",), ("hidden_size",))
    with pytest.raises(ConversionError, match=r"HF tensor in two rows: model\.norm\.weight"):
        bind(raw("qwen2"), replace(qwen, table=(*qwen.table, norm)))
    same = Whole("decoder.final_layernorm.weight", ("other",), ("hidden_size",))
    with pytest.raises(ConversionError, match=r"in two rows: decoder\.final_layernorm\.weight"):
        bind(raw("qwen2"), replace(qwen, table=(*qwen.table, same)))


def test_a_vector_whose_row_does_not_say_what_it_is_is_refused() -> None:
    qwen = FAMILIES["qwen2"]
    bias = Whole("output_layer.bias", ("lm_head.bias",), ("vocab_size",))
    said = r"output_layer\.bias is a matrix, but it has one dimension: give its row role=Role\.BIAS"
    with pytest.raises(ConversionError, match=said):
        bind(raw("qwen2"), replace(qwen, table=(*qwen.table, bias)))
    bind(raw("qwen2"), replace(qwen, table=(*qwen.table, replace(bias, role=Role.BIAS))))


def test_a_layout_is_worked_out_once_for_all_layers() -> None:
    table = small("mistral", layers=30)
    shapes = table.hf_shapes()
    blocks_of.cache_clear()
    for entry in table.entries:
        parts = [torch.zeros(shapes[name]) for name in entry.hf]
        shard = torch.empty(entry.row.local_shape(table.architecture, 2))
        fill_shard(entry.row, table.architecture, shard, parts, 1, 2)
    assert blocks_of.cache_info().misses == len({entry.row for entry in table.entries}) == 9


def test_a_later_layer_may_have_a_window_and_the_blocks_are_still_shared() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    table = small(use_sliding_window=True, sliding_window=8, layer_types=kinds)
    architecture = table.architecture
    first, *others = architecture.layers
    assert [layer.mixer.window for layer in architecture.layers] == [None, 8, 8]
    assert others[0] is others[1]
    assert hash(architecture) == hash(replace(architecture, layers=(first, first, first)))
