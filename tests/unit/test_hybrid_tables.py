"""Tables of models whose layers hand a state on: what keeps its dtype, what can be adapted, and the
layers for multi-token prediction of Qwen3-Next and Nemotron 3.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.adapters.table import (
    PREFIX,
    A,
    B,
    build_adapter_table,
    is_adaptable,
    name_module,
)
from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConversionError
from tests.exact import load_hf
from tests.hybrid_sizes import HYBRIDS
from tests.unit.edited import Tensors, edit, rename

FP32 = ("A_log", "linear_attn.norm.weight", "o_norm.weight", "mixer.D", "e_score_correction_bias")
"""What makers keep in fp32."""


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_text", "nemotron_h", "olmo_hybrid", "kimi_linear"]
)
def test_what_makers_keep_in_fp32_comes_back_in_it(checkpoint, tmp_path: Path, family: str) -> None:
    def widen(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(FP32) or "self_attn.dt_bias" in name:
                tensors[name] = torch.randn(tensors[name].shape)

    path = edit(checkpoint(family, dtype="bfloat16", tokenizer=False), tmp_path / "source", widen)
    table = bind(read_config(path))
    with HfReader(path) as reader:
        table.check_hf(reader.shapes, reader.dtypes)
        wide = {name for name in reader.shapes if reader.dtypes[name] == torch.float32}
    assert wide == {n for e in table.exported() if e.row.keeps_dtype for n in e.hf} != set()
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    assert verify(path, tmp_path / "hf").equal
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert {n for n, t in load_file(file).items() if t.dtype == torch.float32} == wide


IN_MEMORY = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
"""What transformers has, which some checkpoints have, too."""
OTHER_NAMES = [
    ("kimi_linear", {".mlp.": ".block_sparse_moe."}),
    ("olmo_hybrid", IN_MEMORY),
    ("olmo_hybrid", {"post_attention_layernorm": "feedforward_layer_norm"}),
]


@pytest.mark.parametrize(("family", "names"), OTHER_NAMES, ids=str)
def test_tensors_are_read_and_written_by_each_of_the_names_that_checkpoints_have(
    checkpoint, tmp_path: Path, family: str, names: dict[str, str]
) -> None:
    path = edit(checkpoint(family, tokenizer=False), tmp_path / "source", rename(names))
    with HfReader(path) as reader:
        assert open_model(path).table.hf_shapes() == reader.shapes
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    assert verify(path, tmp_path / "hf").equal


def test_convolutions_that_transformers_cuts_into_thirds_are_refused(
    checkpoint, tmp_path: Path
) -> None:
    load_hf(checkpoint("olmo_hybrid", tokenizer=False)).save_pretrained(tmp_path / "saved")
    with pytest.raises(ConversionError, match=r"misshapen: .*\.q_conv1d\.weight"):
        convert(tmp_path / "saved", tmp_path / "mcore", "mcore")


ADAPTED = {
    "falcon_h1": ["mamba.in_proj", "mamba.out_proj", "self_attn.q_proj"],
    "lfm2": ["conv.in_proj", "conv.out_proj"],
    "lfm2_moe": ["conv.in_proj", "feed_forward.experts.0.w1"],
    "qwen3_next": ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"],
    "nemotron_h": ["mixer.in_proj", "mixer.out_proj", "mixer.fc1_latent_proj"],
    "granitemoehybrid": ["mamba.in_proj", "mamba.out_proj"],
    "kimi_linear": [
        *(f"self_attn.{name}_proj" for name in ("b", "g_a", "g_b")),
        *(f"self_attn.forget_gate.{name}_proj" for name in ("f_a", "f_b")),
    ],
    "olmo_hybrid": [f"linear_attn.{name}_proj" for name in "qkvgbao"],
    "qwen3_5_text": [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")],
}


def assert_adaptable(table: Table, names: list[str]) -> None:
    """Projections have adapters of their shapes, these among them, and nothing else of mixers."""
    rank, shapes = 3, table.hf_shapes()
    weights = [entry for entry in table.entries if is_adaptable(entry)]
    assert not any("conv1d" in entry.megatron or "A_log" in entry.megatron for entry in weights)
    parts = {e.megatron: tuple(range(len(e.hf))) if len(e.hf) > 1 else None for e in weights}
    for chosen in (parts, dict.fromkeys(parts)):
        adapters = build_adapter_table(table, rank, chosen).hf_shapes()
        for entry in weights:
            if entry.expert is None:
                for name in entry.hf:
                    rows, columns = shapes[name]
                    module = PREFIX + name_module(name, table)
                    assert adapters[module + B] == (rows, rank), name
                    assert adapters.get(module + A, (rank, columns)) == (rank, columns), name
    for name in names:
        assert any(name in each for each in adapters), name


@pytest.mark.parametrize("family", ADAPTED)
def test_projections_can_have_adapters_and_convolutions_cannot(checkpoint, family: str) -> None:
    latent = {"moe_latent_size": 12} if family == "nemotron_h" else {}
    assert_adaptable(bind(read_config(checkpoint(family, **latent))), ADAPTED[family])


MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.post_attention_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 64),
    "mtp.layers.0.self_attn.k_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.v_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 64),
    "mtp.layers.0.self_attn.q_norm.weight": (16,),
    "mtp.layers.0.self_attn.k_norm.weight": (16,),
    "mtp.layers.0.mlp.gate.weight": (4, 64),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 64),
    **{
        f"mtp.layers.0.mlp.{block}.{name}_proj.weight": shape
        for block, width in (("shared_expert", 24), *((f"experts.{e}", 16) for e in range(4)))
        for name, shape in (("gate", (width, 64)), ("up", (width, 64)), ("down", (64, width)))
    },
}
"""The tensors of the layer for multi-token prediction of Qwen3-Next."""


def test_the_layer_that_nemotron_3_super_has_for_prediction_is_carried_or_held(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS["Nemotron-3-Super-120B-A12B"][1]))
    config = read_config(tmp_path)
    table, held = bind(config), bind(config, mtp_layers=1)
    shapes, alike = table.hf_shapes(), {"backbone.layers.7.": "0.", "backbone.layers.1.": "1."}
    own = {"0.enorm.weight": (4096,), "0.hnorm.weight": (4096,), "0.eh_proj.weight": (4096, 8192)}
    own["1.final_layernorm.weight"] = (4096,)
    for prefix, start in alike.items():
        own |= {n.replace(prefix, start): s for n, s in shapes.items() if n.startswith(prefix)}
    extra = {f"mtp.layers.{name}": shape for name, shape in own.items()}
    assert len(extra) == 3 + 5 + 1 + 7 + 2 * 512
    table.check_hf(shapes | extra, {})
    assert all(table.ignored[name].carried for name in extra)
    assert held.hf_shapes() == shapes | extra and not held.carried()
    assert bind(config, tensors=extra).architecture.mtp_layers == 1
    with pytest.raises(ConversionError, match=r"unexpected: mtp.layers.2.norm.weight"):
        table.check_hf(shapes | {"mtp.layers.2.norm.weight": (1,)}, {})


def test_the_layer_that_qwen3_next_has_for_prediction_is_carried_or_held(checkpoint) -> None:
    path = checkpoint("qwen3_next")
    with HfReader(path) as reader:
        own = dict(reader.shapes)
    config, dtypes = read_config(path), dict.fromkeys((*own, *MTP), torch.bfloat16)
    without, held = bind(config), bind(config, mtp_layers=1)
    without.check_hf(own, dtypes)
    without.check_hf(own | MTP, dtypes)
    assert {name for name in without.carried() if name in MTP} == MTP.keys()
    assert bind(config, tensors=MTP).architecture.mtp_layers == 1
    held.check_hf(own | MTP, dtypes)
    assert held.hf_shapes() == own | MTP and not held.carried()
    with pytest.raises(ConversionError, match=r"missing: mtp\.fc\.weight"):
        held.check_hf(own, dtypes)
    names = {entry.megatron for entry in held.entries if entry.megatron.startswith("mtp.")}
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight"} <= names
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in names
    assert not any("in_proj" in name for name in names)
