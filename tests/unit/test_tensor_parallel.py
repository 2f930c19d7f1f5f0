"""Tensor parallelism over transformers' modules: which ranks hold what, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megatron_policy.config.fsdp import DTensorConfig
from megatron_policy.converters.rows.blocks import fill_parts, fill_shard
from megatron_policy.converters.rows.shards import copies_of
from megatron_policy.engines.hugging_face.module import Decoder, sources_of
from megatron_policy.engines.hugging_face.table import Cut, Shape, ShardRow, Shares
from megatron_policy.engines.hugging_face.tensor_plan import Style, plan_of
from megatron_policy.engines.hugging_face.tensor_regions import TensorRegion
from megatron_policy.engines.hugging_face.tensor_split import split
from megatron_policy.errors import ConfigError
from megatron_policy.weights.geometry import segments
from tests.pure.test_checkpoint_slices import architecture

CUTS: dict[str, tuple[tuple[Shape, ...], Cut, int | None]] = {
    "columns": (((12, 6),), Cut(2, 0), 0),
    "rows": (((5, 12),), Cut(4, 1), 0),
    "all": (((7,),), Cut(2), 0),
    "keys of copies": (((8, 3),), Cut(4, 0, copies=2), 0),
    "a padded vocabulary": (((11, 3),), Cut(4, 0), 0),
    "gate and up": (((4, 6), (4, 6)), Cut(2, 0), 0),
    "gate and up of an expert": (((4, 6), (4, 6)), Cut(2, 0), 1),
    "an expert": (((6, 4),), Cut(2, 1), 0),
    "a constant that no rank shards": (((5,),), Cut(2), None),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_ranks_hold_every_element_and_send_it_once(name: str, shards: int) -> None:
    parts, cut, dim = CUTS[name]
    row, arch = ShardRow("w", ("",) * len(parts), parts=parts, cut=cut, dim=dim), architecture(2)
    size = cut.ranks * shards
    start = iter(range(1, 1000))
    whole = [torch.tensor([next(start) for _ in range(math.prod(s))]).view(s) for s in parts]
    again, sent = [torch.zeros_like(part) for part in whole], [torch.zeros_like(p) for p in whole]
    held = 0
    for rank in range(size):
        shard = torch.full(row._box(rank, size)[1], -1)
        fill_shard(row, arch, shard, whole, rank, size)
        assert (shard >= 0).all()
        assert (shard == 0).sum() == row.pad_rows(arch, rank, size) * math.prod(shard.shape[1:])
        fill_parts(row, arch, again, shard, rank, size)
        held += int((shard > 0).sum())
        for number, part in enumerate(sent):
            for segment in segments(row, arch, number, rank, size):
                for _, hf, own in segment.pieces(0, segment.elements):
                    part.as_strided(hf.size, hf.stride, hf.offset).add_(1)
                    mine = shard.as_strided(own.size, own.stride, own.offset)
                    assert torch.equal(
                        mine, whole[number].as_strided(hf.size, hf.stride, hf.offset)
                    )
    assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    assert all((part == 1).all() for part in sent)
    copies = cut.ranks if cut.dim is None else cut.copies
    assert held == copies * (1 if dim is not None else shards) * sum(map(torch.numel, whole))
    assert max(count for _, count in copies_of(row, arch, size)) == held // sum(
        map(torch.numel, whole)
    )


SIZES = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "vocab_size": 11,
    "pad_token_id": 0,
}


SPARSE = {"activation_sparsity_pattern": [0.9], "num_kv_shared_layers": 0}


def model_of(kind: str, **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SIZES | sizes)))


def shared(model: Any, ranks: int, rank: int = 0, **keys: Any) -> Shares:
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    plan = plan_of(DTensorConfig(tensor_parallel_size=ranks, **keys), model)
    sources = sources_of(model, model.state_dict())
    region = TensorRegion(group, keys.get("sequence_parallel", False))
    return split(Decoder(model), plan, sources, region, ends=True)


def test_ranks_beyond_the_key_heads_hold_copies_of_them() -> None:
    shares = shared(model := model_of("qwen3"), 6, 5)
    attention = "model.layers.0.self_attn."
    assert shares.cut(f"{attention}q_proj.weight") == Cut(6, 0)
    assert shares.cut(f"{attention}k_proj.weight") == Cut(6, 0, copies=2)
    assert shares.cut(f"{attention}o_proj.weight") == Cut(6, 1)
    assert shares.cut("model.norm.weight") == Cut(6)
    assert shares.partial == {f"{attention}q_norm.weight", f"{attention}k_norm.weight"}
    layer = model.model.layers[0].self_attn
    assert layer.k_proj.weight.shape == layer.q_proj.weight.shape == (4, 24)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (2, 24)
    assert shares.shapes["lm_head.weight"] == (11, 24)
    assert model.model.embed_tokens.padding_idx is None
    # Of a share of the positions, every norm sees a share too.
    shares = shared(model_of("qwen3"), 3, sequence_parallel=True)
    partial = {name for name in shares.partial if "norm" in name}
    assert partial == {name for name in shares.shapes if "norm" in name}
    assert not any("proj" in name for name in shares.partial)


@pytest.mark.parametrize(
    ("kind", "sizes", "ranks", "why"),
    [
        ("qwen2", {}, 4, r"does not split 6 attention heads with 3 key-value heads: use one of"),
        ("qwen2", {}, 2, r"use one of \[1, 3, 6\]"),
        ("qwen2", {"intermediate_size": 50}, 3, r"the 50 features of .*gate_proj.*: use one of"),
        ("bloom", None, 2, "transformers has no plan .* BloomForCausalLM: set .* to 1, or give"),
        ("cohere", {"use_qk_norm": True}, 3, "CohereAttention, whose CohereLayerNorm.weight is no"),
        ("qwen2", {"attention_dropout": 0.1}, 3, "attention_dropout=0.1, .*: set .*overrides.att"),
        ("gemma3n_text", SPARSE, 3, "statistics of all features"),
    ],
)
def test_what_ranks_cannot_share_is_refused(kind: str, sizes: Any, ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        shared(model_of(kind, **{"n_head": 6} if sizes is None else sizes), ranks)


_LAYER = "model.layers.*."
PLAN = {
    f"{_LAYER}mlp.gate_proj": "colwise",
    f"{_LAYER}mlp.up_proj": ColwiseParallel(),
    f"{_LAYER}mlp.down_proj": RowwiseParallel(),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def made_plan() -> dict[str, Any]:
    return PLAN


WITH_NORM = PLAN | {"model.norm": SequenceParallel()}
OF_SEQUENCES = PLAN | {
    "model.norm": SequenceParallel(),
    f"{_LAYER}mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}
TYPO = PLAN | {f"{_LAYER}mlp.gate": "colwise"}
OTHER = PLAN | {f"{_LAYER}mlp.up_proj": ColwiseParallel(output_layouts=Shard(0))}
UNKNOWN = PLAN | {f"{_LAYER}mlp.up_proj": "both ways"}
NORM = PLAN | {"model.norm": "colwise"}
HALF = {f"{_LAYER}mlp.down_proj": "rowwise"}
NUMBER = 3


@pytest.mark.parametrize("name", ["PLAN", "made_plan"])
def test_a_plan_of_ones_own_is_imported_and_torch_objects_mean_the_same(name: str) -> None:
    settings = DTensorConfig(tensor_parallel_size=2, custom_parallel_plan=f"{__name__}.{name}")
    mlp = "model.layers.0.mlp."
    assert plan_of(settings, model_of("qwen2")) == {
        f"{mlp}gate_proj": Style.COLUMNS,
        f"{mlp}up_proj": Style.COLUMNS,
        f"{mlp}down_proj": Style.ROWS,
    }
    shares = shared(model_of("qwen2"), 2, custom_parallel_plan=f"{__name__}.{name}")
    assert shares.cut(f"{mlp}down_proj.weight") == Cut(2, 1)
    assert shares.cut("model.layers.0.self_attn.q_proj.weight") == Cut(2)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("WITH_NORM", "gives 'model.norm' SequenceParallel: set .*sequence_parallel to true"),
        ("OF_SEQUENCES", r"RowwiseParallel from S\(-1\) to S\(1\), which is not supported"),
        ("TYPO", r"no module of Qwen2ForCausalLM is called 'model.layers.\*.mlp.gate'"),
        ("OTHER", r"gives 'model.layers.\*.mlp.up_proj' ColwiseParallel from"),
        ("UNKNOWN", "the style 'both ways', which is not supported: give 'colwise', 'rowwise'"),
        ("NORM", "a Qwen2RMSNorm, the style 'colwise', which linear layers have"),
        ("HALF", "gives Qwen2DecoderLayer the style 'rowwise' alone: .* give both by"),
        ("NUMBER", "is not a plan: give a dict from names of modules"),
        ("NOTHING", "cannot be used: .*NOTHING.* Give the import path of a dict"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(name: str, why: str) -> None:
    path = f"{__name__}.{name}"
    with pytest.raises(ConfigError, match=why):
        shared(model_of("qwen2"), 2, custom_parallel_plan=path)
    if name == "OF_SEQUENCES":
        shares = shared(model_of("qwen2"), 2, custom_parallel_plan=path, sequence_parallel=True)
        assert "model.norm.weight" in shares.partial
