"""Every family against real transformers models: names, shapes, configs, and the bits both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.hf_files import (
    HfReader,
    copy_side_files,
    publish,
    read_config,
    stage,
    write_index,
    write_shard,
)
from megatron_policy.converters.rotary import Llama3Scaling, Rope
from megatron_policy.converters.rows import fill_parts, fill_shard
from megatron_policy.converters.table import Table, bind
from megatron_policy.converters.traits import QkNorm
from megatron_policy.errors import ConversionError
from tests.unit.published import COMMON, LLAMA3, PUBLISHED

SMALL = {
    "vocab_size": 150,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SOME = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-group": ("llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-scaled-tied": (
        "llama",
        {"rope_scaling": LLAMA3, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 4, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-some-windows": ("qwen2", SOME),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3-tied": ("qwen3", {"head_dim": 4, "tie_word_embeddings": True}),
    "qwen3-all-windows": ("qwen3", {"head_dim": 4, **SOME, "max_window_layers": 0}),
}


def config_file(path: Path, family: str, **fields: Any) -> Path:
    """A directory whose config.json was made by the config class of `family`."""
    AutoConfig.for_model(family, **SMALL | fields).save_pretrained(path)
    return path


def edited(path: Path, family: str, **fields: Any) -> Path:
    """The same with fields put into the file by hand, past the config class; None removes one."""
    config_file(path, family)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return path


def architecture(path: Path) -> Architecture:
    return bind(read_config(path)).architecture


@pytest.fixture(params=MODELS, scope="module")
def checkpoint(request, tmp_path_factory) -> Path:
    """A small random model in bf16, with biases and norm weights that are neither 0 nor 1."""
    family, fields = MODELS[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.bfloat16().save_pretrained(path, max_shard_size="20KB")
    return path


def test_the_table_lists_exactly_the_tensors_of_the_checkpoint(checkpoint: Path) -> None:
    with HfReader(checkpoint) as reader:
        table = bind(read_config(checkpoint))
        assert table.hf_shapes() == reader.shapes
        table.check_hf(reader.shapes, reader.dtypes)
        assert set(reader.dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_number_of_parameters_the_model_has(
    tmp_path: Path, name: str
) -> None:
    parameters, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | config))
    shapes = bind(read_config(tmp_path)).hf_shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def shards_of(table: Table, reader: HfReader, tp: int, dtype: torch.dtype) -> dict[str, list]:
    """Every entry's shards over `tp` ranks, in `dtype`."""
    arch, shards = table.architecture, {}
    for entry in table.entries:
        parts = [reader.part(name) for name in entry.hf]
        shards[entry.megatron] = [
            torch.full(entry.row.local_shape(arch, tp), torch.nan, dtype=dtype) for _ in range(tp)
        ]
        for rank, shard in enumerate(shards[entry.megatron]):
            fill_shard(entry.row, arch, shard, parts, rank, tp)
    return shards


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_checkpoint_comes_back_bit_for_bit_and_loads_in_transformers(
    checkpoint: Path, tmp_path: Path, tp: int
) -> None:
    table, out = bind(read_config(checkpoint)), tmp_path / "out"
    partial, weight_map, size = stage(out), {}, 0
    with HfReader(checkpoint) as reader:
        shards = shards_of(table, reader, tp, torch.float32)
        for number, entry in enumerate(table.exported()):
            parts = [torch.empty(reader.shapes[n], dtype=reader.dtypes[n]) for n in entry.hf]
            for rank, shard in enumerate(shards[entry.megatron]):
                fill_parts(entry.row, table.architecture, parts, shard, rank, tp)
            file = f"model-{number}.safetensors"
            tensors = dict(zip(entry.hf, parts, strict=True))
            described = {name: (part.dtype, part.shape) for name, part in tensors.items()}
            write_shard(partial, file, described, tensors.items())
            weight_map |= dict.fromkeys(entry.hf, file)
            size += sum(part.nbytes for part in parts)
        write_index(partial, weight_map, size)
        copy_side_files(checkpoint, partial)
        publish(partial, out)
        with HfReader(out) as written:
            assert written.dtypes == reader.dtypes
            for name in reader.shapes:
                assert torch.equal(written.tensor(name), reader.tensor(name)), name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")(tokens).logits
            for path in (checkpoint, out)
        )
    assert torch.equal(one, other)


def test_the_ranks_read_each_byte_once_and_what_they_all_hold_once_each(checkpoint: Path) -> None:
    table = bind(read_config(checkpoint))
    arch, tp = table.architecture, 2
    entries = table.entries_of(range(arch.num_layers), first=True, last=True)
    read = []
    for rank in range(tp):
        with HfReader(checkpoint) as reader:
            held = 0
            for entry in entries:
                shard = torch.empty(entry.row.local_shape(arch, tp), dtype=torch.bfloat16)
                parts = [reader.part(name) for name in entry.hf]
                fill_shard(entry.row, arch, shard, parts, rank, tp)
                padding = entry.row.pad_rows(arch, rank, tp)
                held += (shard.numel() - padding * shard[0].numel()) * 2
            assert reader.bytes_read == held
            read.append(held)
    shapes = table.hf_shapes()
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    everywhere = sum(
        2 * torch.Size(shapes[name]).numel()
        for entry in entries
        if entry.row.shard_dim is None
        for name in entry.hf
    )
    assert sum(read) == total + (tp - 1) * everywhere


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {}, {"rope": Rope(1e4), "window": None, "tied": False, "kv_channels": 4}),
        ("llama", {"rope_theta": 5e5}, {"rope": Rope(5e5)}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope": Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))},
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"add_bias_linear": True}),
        ("llama", {"head_dim": 8}, {"kv_channels": 8}),
        ("mistral", {"sliding_window": 4}, {"window": 4, "windowed": ()}),
        ("mistral", {"sliding_window": None}, {"window": None}),
        ("qwen2", {}, {"add_qkv_bias": True, "add_bias_linear": False, "qk_norm": QkNorm.NONE}),
        ("qwen2", {"sliding_window": 4}, {"window": None, "windowed": ()}),
        ("qwen2", SOME, {"window": 4, "windowed": (False, True, True)}),
        ("qwen3", {"head_dim": 4, **SOME, "max_window_layers": 0}, {"window": 4, "windowed": ()}),
        (
            "qwen3",
            {"head_dim": 8},
            {"qk_norm": QkNorm.PER_HEAD, "qkv_bias": False},
        ),
        ("qwen3", {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "kv_channels": 128}),
        ("qwen2", {"rms_norm_eps": 1e-5}, {"layernorm_epsilon": 1e-5, "num_query_groups": 2}),
    ],
)
def test_a_config_is_read_as_transformers_reads_it(
    tmp_path: Path, family: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    read = architecture(config_file(tmp_path, family, **fields))
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("theta", "scaling"), [(5e5, {}), (5e5, LLAMA3), (1e4, {"rope_type": "default"})]
)
def test_the_rope_of_either_release_of_transformers_is_read_alike(
    tmp_path: Path, theta: float, scaling: dict[str, Any]
) -> None:
    newer = {"rope_type": "default", **scaling, "rope_theta": theta}
    reads = [
        architecture(edited(tmp_path / "newer", "llama", rope_parameters=newer, rope_theta=None)),
        architecture(
            edited(
                tmp_path / "older",
                "llama",
                rope_parameters=None,
                rope_theta=theta,
                rope_scaling=scaling or None,
            )
        ),
    ]
    assert reads[0] == reads[1]
    assert reads[0].rope.base == theta
    assert (reads[0].rope.scaling is None) == ("factor" not in scaling)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias = True: mlp_bias is False"),
        ("llama", {"mlp_bias": True}, "attention_bias = False: mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu': the MLP is SwiGLU"),
        ("llama", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1: unknown field"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ("qwen2", {"use_mrope": True}, "use_mrope = True"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "no model family 'ministral'"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types = 'sliding_attention': needs use_sliding_window",
        ),
        ("qwen2", {"architectures": ["Qwen2ForTokenClassification"]}, "Qwen2ForCausalLM"),
    ],
)
def test_a_config_that_would_change_the_result_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], said: str
) -> None:
    path = edited(tmp_path, family, **fields)
    with pytest.raises(ConversionError) as caught:
        architecture(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("release", ["older", "newer"])
def test_other_rope_scalings_are_refused_by_name(tmp_path: Path, kind: str, release: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    scaling |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if kind == "longrope" else {}
    if release == "older":
        fields = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": scaling}
    else:
        fields = {"rope_theta": None, "rope_parameters": scaling | {"rope_theta": 1e4}}
    with pytest.raises(ConversionError) as caught:
        architecture(edited(tmp_path, "llama", **fields))
    assert f"rope_type = '{kind}': frequencies can be 'default' or" in str(caught.value)
    assert "unknown field" not in str(caught.value)


def test_a_config_with_everything_transformers_itself_adds_is_translated(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        "qwen2",
        use_mrope=False,
        torch_dtype="bfloat16",
        temperature=0.7,
        eos_token_id=[1, 2],
        max_length=64,
        transformers_version="4.40.0",
    )
    assert architecture(path).add_qkv_bias


def test_every_problem_of_a_config_is_listed_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", attention_bias=True, hidden_act="relu", one=1, two=2)
    with pytest.raises(ConversionError) as caught:
        architecture(path)
    for said in ("attention_bias", "hidden_act", "one = 1", "two = 2"):
        assert said in str(caught.value)
