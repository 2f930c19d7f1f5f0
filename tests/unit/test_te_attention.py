"""What Transformer Engine's attention is given, and when torch's takes its place."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_policy import device
from megatron_policy.engines.megatron.layers import te_attention as module
from megatron_policy.engines.megatron.layers.sequences import SequenceParams, sequence_params
from megatron_policy.engines.megatron.layers.te_attention import TEAttention, te_attention
from megatron_policy.packing.tokens import packed_layout, padded_layout

HEADS, HEAD_DIM = 2, 8


def group(size: int = 1, rank: int = 0) -> Any:
    """A context-parallel group as one of its ranks sees it."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


class Engine(MegatronModule):
    """Stands in for `TEDotProductAttention` by its calling convention, and keeps what it got; one
    rank alone attends as the engine would.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.shapes: list[list[tuple[int, ...]]] = []
        self.told: Any = None
        self.channels, self.scale = (k_channels, v_channels), softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        assert attn_mask_type is AttnMaskType.causal and attention_mask is attention_bias is None
        self.shapes.append([tuple(x.shape) for x in (query, key, value)])
        self.told = packed_seq_params
        if packed_seq_params is None:
            return attend(query, key, value, self.scale)
        assert packed_seq_params.qkv_format == "thd"
        ends = packed_seq_params.cu_seqlens_q.tolist()
        assert ends[-1] <= query.size(0) * self.config.context_parallel_size
        if self.config.context_parallel_size > 1:
            return value.flatten(1)
        parts = [
            attend(*(x[a:b].unsqueeze(1) for x in (query, key, value)), self.scale)
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts).squeeze(1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """`[S, B, N, H]` to `[S, B, N*H]`."""
    states = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    context = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True, scale=scale)
    return context.permute(2, 0, 1, 3).flatten(2)


def build(ranks: int = 1, given: dict[str, Any] | None = None, **more: Any) -> TEAttention:
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
    config = TransformerConfig(
        num_layers=1, attention_dropout=0.0, context_parallel_size=ranks, **sizes, **more
    )
    attention: TEAttention = build_module(
        te_attention(Engine),
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        **{"cp_comm_type": None, "softmax_scale": None, "pg_collection": None, **(given or {})},
    )
    return attention


def states(positions: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    draw, shape = torch.Generator().manual_seed(0), (positions, rows, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(3)]


def call(attention: TEAttention, given: list[torch.Tensor], params: Any) -> torch.Tensor:
    context: torch.Tensor = attention(
        *given, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params
    )
    return context


def packed(size: int = 1, rank: int = 0) -> SequenceParams:
    """Four sequences, one of them empty, and filler."""
    zigzag = 2 * size if size > 1 else 1
    layout = packed_layout([3, 1, 0, 7], 7, zigzag, 8, size)
    params = sequence_params(layout, group(size, rank))
    assert params is not None
    return params


def test_packed_sequences_reach_the_engine_one_behind_the_other() -> None:
    attention, params, given = build(), packed(), states(16, 1)
    context = call(attention, given, params)
    assert context.shape == (16, 1, HEADS * HEAD_DIM)
    for start, length in [(0, 3), (3, 1), (4, 7), (11, 5)]:
        alone = attend(*(x[start : start + length] for x in given))
        torch.testing.assert_close(context[start : start + length], alone)
    told = attention.te_module.told
    assert attention.te_module.shapes == [[(16, HEADS, HEAD_DIM)] * 3]
    assert told.cu_seqlens_q.tolist() == [0, 3, 4, 11, 16]
    assert told.cu_seqlens_q.dtype == torch.int32
    assert told.max_seqlen_q == told.max_seqlen_kv == 7
    same = (told.cu_seqlens_kv, told.cu_seqlens_q_padded, told.cu_seqlens_kv_padded)
    assert all(torch.equal(ends, told.cu_seqlens_q) for ends in same)
    assert told.cp_group is None and told.local_cp_size is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_engine_hears_of_all_ranks_positions(rank: int) -> None:
    attention, params = build(2), packed(2, rank)
    call(attention, states(8, 1), params)
    assert attention.te_module.shapes == [[(8, HEADS, HEAD_DIM)] * 3]
    # Each sequence is filled up to a multiple of four; the engine divides by the ranks itself.
    assert attention.te_module.told.cu_seqlens_q.tolist() == [0, 4, 8, 16]
    assert attention.te_module.told.max_seqlen_q == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_padded_rows_reach_the_engine_as_they_are(ranks: int) -> None:
    attention, given = build(ranks), states(4, 3)
    params = sequence_params(padded_layout(3, 4 * ranks, 4, ranks), group(ranks))
    assert (params is None) == (ranks == 1)
    context = call(attention, given, params)
    assert attention.te_module.shapes == [[(4, 3, HEADS, HEAD_DIM)] * 3]
    assert attention.te_module.told is None
    assert torch.equal(context, attend(*given))


def test_torch_attends_where_the_engine_cannot() -> None:
    query, key, value = states(16, 1)
    for given, params, attention in [
        (states(16, 1, torch.float32), packed(), build()),
        ([query, key, value[..., :5]], packed(), build()),
        # A cache, or what generation reads into it: every rank computes all of it.
        ([query, key, value], None, build(2)),
        ([query[-1:], key, value], None, build(2)),
    ]:
        context = call(attention, given, params)
        assert not attention.te_module.shapes
        assert context.shape[:2] == given[0].shape[:2] and context.isfinite().all()


def test_a_window_under_context_parallelism_is_torchs() -> None:
    alone, split = build(window_size=(2, 0)), build(2, window_size=(2, 0))
    call(alone, states(16, 1), packed())
    assert len(alone.te_module.shapes) == 1
    # Of one rank that holds all keys in order: no group to gather them from.
    params = replace(packed(), context_group=None)
    call(split, states(16, 1), params)
    assert not split.te_module.shapes
    full = build(2, window_size=(2, 0), window_attn_skip_freq=[0])
    call(full, states(8, 1), packed(2))
    assert len(full.te_module.shapes) == 1


def test_blocks_that_see_each_other_in_both_directions_are_torchs() -> None:
    attention, given = build(), states(16, 1)
    params = sequence_params(padded_layout(1, 16, 1, 1), group(), blocks_B=[[range(3, 9)]])
    context = call(attention, given, params)
    assert not attention.te_module.shapes
    assert torch.equal(context, attention.fallback(*given, None, packed_seq_params=params))
    assert not torch.equal(context, attention.fallback(*given, None))


LATENT = {"k_channels": 192, "v_channels": 128, "softmax_scale": 0.3}
"""What Megatron-Core's MLA builds its attention with, in DeepSeek's sizes."""


def latent_states(positions: int, rows: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(positions, rows, HEADS, size, generator=draw) for size in (192, 192, 128)]


def on_gpu(monkeypatch: pytest.MonkeyPatch, release: str = "2.5.0", cudnn: bool = True) -> None:
    monkeypatch.setattr(module, "trains_packed_cudnn", lambda: cudnn)
    monkeypatch.setattr(
        module, "is_te_min_version", lambda least: Version(release) >= Version(least)
    )


def test_packed_values_of_another_head_size_reach_the_engine_unpadded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch)
    # The stand-in computes in fp32, so that its numbers tell which scale and pieces it was given.
    monkeypatch.setattr(module, "_HALF", (torch.float32,))
    attention, params, given = build(given=LATENT), packed(), latent_states(16)
    context = call(attention, given, params)
    assert attention.te_module.channels == (192, 128)
    assert attention.te_module.shapes == [[(16, HEADS, 192), (16, HEADS, 192), (16, HEADS, 128)]]
    assert context.shape == (16, 1, HEADS * 128)
    torch.testing.assert_close(context, attention.fallback(*given, None, packed_seq_params=params))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_head_sizes_reach_the_engine_under_context_parallelism(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch)
    for params, rows in [
        (packed(2, rank), 1),
        (sequence_params(padded_layout(3, 16, 4, 2), group(2, rank)), 3),
    ]:
        attention = build(2, given=LATENT)
        given = [x.bfloat16() for x in latent_states(8, rows)]
        context = call(attention, given, params)
        ((_, _, value),) = attention.te_module.shapes
        assert value[-1] == 128 and context.shape == (8, rows, HEADS * 128)


def test_two_head_sizes_are_torchs_where_the_engine_may_lack_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = {"window_size": (2, 0)}
    for release, cudnn, more in (
        ("2.4.0", True, {}),
        ("2.5.0", False, {}),
        ("2.18.0", True, window),
    ):
        on_gpu(monkeypatch, release, cudnn)
        attention = build(given=LATENT, **more)
        context = call(attention, [x.bfloat16() for x in latent_states(16)], packed())
        assert not attention.te_module.shapes and context.shape == (16, 1, HEADS * 128)


def test_two_head_sizes_are_those_that_every_gpu_of_the_rule_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch)
    sizes = ((192, 128), (128, 64), (24, 16), (256, 128), (192, 64), (24, 12))
    assert [module.two_head_sizes(*each) for each in sizes] == [True] * 3 + [False] * 3


def test_cudnn_trains_packed_sequences_where_it_is_known_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for capability, version, variables, runs in (
        ((9, 0), 91100, {}, True),
        ((10, 3), 92000, {}, True),
        ((9, 0), 91002, {}, False),
        ((8, 0), 92000, {}, False),
        ((12, 0), 92000, {}, False),
        ((9, 0), 92000, {"NVTE_FUSED_ATTN": "0"}, False),
        ((9, 0), 92000, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, False),
        ((0, 0), None, {}, False),
    ):
        for name in ("NVTE_FUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(device, "compute_capability", lambda found=capability: found)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda found=version: found)
        assert device.trains_packed_cudnn() == runs, (capability, version, variables)
