"""The tiny checkpoints are what the other tests take them for: loadable and nowhere trivial."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from tests.checkpoints import class_of_model, hf_config, make_checkpoint
from tests.families import DENSE

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_transformers_and_the_table_of_a_family_know_every_weight_and_none_is_constant(
    checkpoint, family: str, tied: bool
) -> None:
    path = checkpoint(family, tied=tied, layers=2)
    model, report = class_of_model(hf_config(path)).from_pretrained(
        path, config=hf_config(path), output_loading_info=True
    )
    assert model.config.model_type == (DENSE[family].hf_model_type or family)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.get_input_embeddings().padding_idx is None
    tensors = load_file(path / "model.safetensors")
    assert any(name.endswith("lm_head.weight") for name in tensors) is not tied
    assert tensors.keys() == bind(read_config(path)).hf_shapes().keys()
    constant = [name for name, t in tensors.items() if t.numel() > 1 and not t.std() > 0.01]
    assert constant == [], "give their names a range in the family's file of tests/families"
    (embedding,) = (tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))
    assert all(row.std() > 0.01 for row in embedding)


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path) -> None:
    files = [
        make_checkpoint(tmp_path / name, "qwen2", layers=1, seed=seed) / "model.safetensors"
        for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    ]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other


def test_shards_dtype_scaling_and_windows_are_written_as_asked(tmp_path) -> None:
    asked = {"dtype": "bfloat16", "rope_scaling": LLAMA3, "max_shard_size": 100_000}
    llama = make_checkpoint(tmp_path / "llama", "llama", layers=2, **asked)
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert "llama3" in json.dumps(model.config.to_dict())

    qwen = make_checkpoint(tmp_path / "qwen", "qwen2", window=8, full_layers=1)
    config = AutoModelForCausalLM.from_pretrained(qwen).config
    assert config.layer_types == ["full_attention"] + ["sliding_attention"] * 3
    mistral = make_checkpoint(tmp_path / "mistral", "mistral", window=8, head_dim=32)
    config = AutoModelForCausalLM.from_pretrained(mistral).config
    assert (config.sliding_window, config.head_dim) == (8, 32)


@pytest.mark.parametrize("family", DENSE)
def test_the_tokenizer_loads_and_gives_text_back(checkpoint, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(family, layers=2))
    text = "Licensed under the Apache License, Version 2.0"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) < len(text) and max(ids) < 256
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2, 3)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "License"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<s>assistant\n")
