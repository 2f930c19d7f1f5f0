"""Models without a family here, under FSDP2 and FSDP1: one training step, scores and the export of
each equal those of one process of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import ConfigError
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy
from tests.dist.fsdp_cases import BATCHINGS, data, decayed, share
from tests.dist.layouts import VOCAB
from tests.dist.shortcuts import refusal
from tests.dist.test_generate import assert_written_as_read, continue_prompts, generation
from tests.exact import load_hf

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8}
MODELS: dict[str, dict[str, Any]] = {
    "bamba": COMMON | MAMBA | {"attn_layer_indices": [1]},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gemma3n_text": COMMON
    | {
        "num_hidden_layers": 4,
        "intermediate_size": [48] * 4,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "sliding_window": 5,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neox": COMMON,
    "gptj": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "nemotron": COMMON,
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phimoe": COMMON | EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "stablelm": COMMON,
}
PACKS = ("gpt_neox", "nemotron")
"""Those whose tokens mix in transformers' attention alone."""
UNDER_FSDP1 = ("gemma3n_text", "phimoe")
"""Those that every run has under FSDP1, too."""
SHARED = ("nemotron", "gpt_neox", "phimoe")
"""Those that transformers has a plan for, by which tensor-parallel ranks share them."""


def make(kind: str, folder: Path) -> Path:
    """A tiny random checkpoint of that model_type, nothing in it trivial."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**MODELS[kind], **tokens, vocab_size=VOCAB)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def one_step(config: dict[str, Any], folder: str) -> dict[str, Any]:
    with open_policy(config) as policy:
        texts = BatchedDataDict(
            {key: share(data(), policy)[key] for key in ("input_ids", "input_lengths")}
        )
        seen = {"dp": policy.coords.dp, "logprobs": policy.logprobs(texts)}
        batch = share(data().get_batch(0, GLOBAL_BATCH), policy)
        seen["step"] = policy.train(batch, LOSSES["token"]())
        policy.export_hf(folder)
        policy.save_checkpoint(f"{folder}-saved", f"{folder}-saved")
        policy.train(batch, LOSSES["token"]())
        policy.load_checkpoint(f"{folder}-saved", f"{folder}-saved")
        policy.export_hf(f"{folder}-again")
    return seen


def load_to_train(path: Path, dtype: torch.dtype) -> Any:
    return load_hf(path, dtype).train()


@pytest.mark.parametrize(
    ("kind", "section", "keys"),
    [
        *((kind, "dtensor_cfg", {}) for kind in MODELS),
        *((kind, "fsdp_cfg", {}) for kind in UNDER_FSDP1),
        *((kind, "fsdp_cfg", {}) for kind in MODELS if kind not in UNDER_FSDP1),
        *((kind, "dtensor_cfg", {"tensor_parallel_size": 2}) for kind in SHARED),
    ],
)
def test_one_step_equals_transformers(ranks, tmp_path, kind, section, keys) -> None:
    path = make(kind, tmp_path / "model")
    batching = BATCHINGS["packed" if kind in PACKS else "padded"]
    config = fsdp_config(path, keys, section=section, **batching)
    seen = ranks.run(2, one_step, config, str(tmp_path / "out"))
    batch = data().get_batch(0, GLOBAL_BATCH)
    loading = {"load": load_to_train, "own": decayed}
    hf = oracle.train(path, batch, GLOBAL_BATCH, oracle.token_level, **loading)
    with torch.no_grad():
        logprobs = oracle.hf_logprobs(load_hf(path, torch.float32), data()["input_ids"])
    inside = torch.arange(logprobs.size(1)) < data()["input_lengths"][:, None] - 1
    by_replica = {rank["dp"]: rank["logprobs"] for rank in seen}
    found = torch.cat([by_replica[replica] for replica in sorted(by_replica)])
    assert torch.allclose(found[:, 1:][inside], logprobs[inside], atol=1e-5, rtol=0)
    assert seen[0]["step"]["loss"].item() == pytest.approx(hf.losses[0], rel=1e-5)
    assert seen[0]["step"]["grad_norm"].item() == pytest.approx(hf.grad_norms[0], rel=1e-5)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    again = load_file(tmp_path / "out-again" / "model.safetensors")
    start = load_file(path / "model.safetensors")
    assert exported.keys() == start.keys()
    assert all(torch.equal(exported[name], again[name]) for name in exported)
    for name, weight in load_hf(tmp_path / "out", torch.float32).named_parameters():
        assert torch.allclose(weight, hf.weights[name], atol=1e-5, rtol=0), name


def test_tokens_are_drawn_at_the_temperature_of_the_policy(ranks, tmp_path) -> None:
    path = make("stablelm", tmp_path / "model")
    config = fsdp_config(path, {}, **generation(temperature=0.5))
    (seen,) = ranks.run(1, continue_prompts, config, None, False)
    assert_written_as_read(path, seen, temperature=0.5)


@pytest.mark.parametrize(
    ("batching", "length", "what"),
    [
        ("padded", "maximum", "policy.rope_length='maximum'"),
        ("dynamic", "batch", "policy.dynamic_batching"),
    ],
)
def test_a_rotary_embedding_that_cannot_be_told_the_length_of_the_text_is_refused(
    ranks, tmp_path, batching: str, length: str, what: str
) -> None:
    path = make("gptj", tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    fields["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (path / "config.json").write_text(json.dumps(fields))
    config = fsdp_config(path, {}, rope_length=length, **BATCHINGS[batching])
    (said,) = ranks.run(1, refusal, config, ConfigError)
    assert said.startswith(f"{what} needs a rotary embedding that can be told the length of the")
    assert "that of GPTJForCausalLM, of type dynamic, cannot: use rope_length='batch'" in said


@pytest.mark.parametrize(
    ("kind", "why"),
    [("bamba", "has linear_attention"), ("bloom", "an attention of its own")],
)
def test_packed_rows_are_refused_where_tokens_mix_elsewhere(ranks, tmp_path, kind, why) -> None:
    path = make(kind, tmp_path / "model")
    config = fsdp_config(path, {}, **BATCHINGS["packed"])
    (said,) = ranks.run(1, refusal, config, ConfigError)
    assert "policy.sequence_packing needs layers" in said and why in said
    assert "use padded or dynamic batches" in said
