"""Every dense family against real transformers models: names, shapes, and the bits both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_policy.converters.files.publishing import new_directory
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_writing import write_index, write_shard
from megatron_policy.converters.formats.side_files import side_files, write_side_files
from megatron_policy.converters.rows import Whole, fill_parts, fill_shard
from megatron_policy.converters.table import Table, bind
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
THREE = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-group": ("llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-scaled-tied": (
        "llama",
        {"rope_scaling": LLAMA3, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "ministral3": ("ministral3", {"head_dim": 8, "pad_token_id": None}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 4, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-some-windows": ("qwen2", SOME),
    "qwen3": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-tied": ("qwen3", {"head_dim": 4, "tie_word_embeddings": True}),
    "qwen3-all-windows": ("qwen3", {"head_dim": 4, **SOME, "max_window_layers": 0}),
    "llama-attention-biases": ("llama", {"attention_bias": True}),
    "gemma2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "attention_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"pad_token_id": None}),
    "phi3-three-heads-per-group": ("phi3", THREE | {"pad_token_id": None}),
    "apertus": ("apertus", {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8, "tie_word_embeddings": True}),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 4, "use_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 4, "sliding_window_pattern": 2}),
    "glm4": ("glm4", {"head_dim": 8, "pad_token_id": None}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8, "attention_bias": True}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"attention_bias": True, "sliding_window": 4}),
    "seed_oss": ("seed_oss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"pad_token_id": None, "mlp_bias": True}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "starcoder2-without-biases": ("starcoder2", {"use_bias": False}),
    "cohere": ("cohere", {"attention_bias": True, "tie_word_embeddings": True}),
    "cohere-norms": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 4}),
}


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
    weight_map, size = {}, 0
    with HfReader(checkpoint) as reader:
        shards = shards_of(table, reader, tp, torch.float32)
        with new_directory(out) as partial:
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
            write_side_files(side_files(checkpoint), partial)
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
        if isinstance(entry.row, Whole)
        for name in entry.hf
    )
    assert sum(read) == total + (tp - 1) * everywhere
