"""Attention in one call is attention in tiles, and is called where it can be.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron_policy import device
from megatron_policy.attention import varlen_attention as module
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.engines.megatron.layers.sequences import SequenceParams, sequence_params
from megatron_policy.packing.tokens import AttentionPiece, packed_layout
from tests.pure.test_tiles import PIECES, pieces_of
from tests.varlen_oracle import varlen_oracle

HEADS, GROUPS, HEAD_DIM, VALUES = 4, 2, 12, 5
LENGTHS = (3, 17, 1, 8)


def attention_of(reach: int | None, dropout: float = 0.0, groups: int = GROUPS) -> TorchAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_DIM,
        attention_dropout=dropout,
        window_size=None if reach is None else (reach, 0),
    )
    return TorchAttention(config, 1, AttnMaskType.causal, "self")


def states_of(queries: int, keys: int, rows: int, head: int = HEAD_DIM) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(queries)
    sizes = [(queries, HEADS, head), (keys, GROUPS, head), (keys, GROUPS, VALUES)]
    return [
        torch.randn(length, rows, *size, generator=random, requires_grad=True)
        for length, *size in sizes
    ]


def packed_params() -> SequenceParams:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    params = sequence_params(packed_layout(LENGTHS, max(LENGTHS), 1, 8, 1), alone)
    assert params is not None
    return params


def differentiated(
    reach: int | None, states: list[torch.Tensor], packed: bool
) -> list[torch.Tensor]:
    """The context and the gradients of the states."""
    params = packed_params() if packed else None
    context = attention_of(reach)(*states, None, packed_seq_params=params)
    weights = torch.linspace(-1, 1, context.numel()).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), states)]


@pytest.mark.parametrize("reach", [None, 0, 4, 40])
@pytest.mark.parametrize(
    ("queries", "keys", "rows", "packed"),
    [(32, 32, 1, True), (24, 24, 3, False), (6, 24, 3, False), (1, 24, 3, False)],
)
def test_one_call_gives_the_numbers_and_gradients_of_tiles(
    queries: int, keys: int, rows: int, packed: bool, reach: int | None
) -> None:
    states = states_of(queries, keys, rows)
    tiled = differentiated(reach, states, packed)
    with varlen_oracle() as oracle:
        called = differentiated(reach, states, packed)
    assert oracle.calls == int(packed or (reach is not None and queries > 1))
    for ours, theirs in zip(called, tiled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_dropout_other_dtypes_and_large_heads_keep_their_tiles() -> None:
    with varlen_oracle() as oracle:
        params = packed_params()
        states = states_of(32, 32, 1)
        attention_of(None)(*(x.double() for x in states), None, packed_seq_params=params)
        attention_of(None)(*states_of(32, 32, 1, 257), None, packed_seq_params=params)
        attention_of(None, dropout=0.5).eval()(*states, None, packed_seq_params=params)
        assert oracle.calls == 1
        dropped = attention_of(None, dropout=0.5)
        dropped._dropout_state = torch.no_grad
        dropped(*states, None, packed_seq_params=params)
        assert oracle.calls == 1


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tensors]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize(
    ("groups", "values", "reach"),
    [(HEADS, 12, None), (2, 5, None), (HEADS, 15, None), (HEADS, 12, 100), (1, 12, 700)],
)
def test_tiles_never_hold_scores_or_a_mask_of_all_positions(
    groups: int, values: int, reach: int | None
) -> None:
    length, sizes = 2048, [(HEADS, HEAD_DIM), (groups, HEAD_DIM), (groups, values)]
    states = [torch.randn(length, 1, *size, requires_grad=True) for size in sizes]
    with Largest() as largest:
        attention_of(reach, groups=groups)(*states, None).sum().backward()
    assert 0 < largest.elements < length**2 / 2
    assert all(x.grad is not None for x in states)


@given(PIECES, st.integers(1, 3))
def test_rectangles_follow_one_another_row_by_row(drawn: list[tuple[int, int]], rows: int) -> None:
    pieces = pieces_of([*drawn, (1, 0)])
    with varlen_oracle():
        found = module.varlen_sequences(pieces, rows)
    assert found is not None
    kept = [piece for piece in pieces if piece.queries] * rows
    assert found.query_ends.diff().tolist() == [piece.queries for piece in kept]
    assert found.key_ends.diff().tolist() == [piece.keys for piece in kept]
    assert found.most_queries == max(piece.queries for piece in kept)
    assert found.most_keys == max(piece.keys for piece in kept)
    selected = [i for start, length in found.key_ranges for i in range(start, start + length)]
    assert selected == [
        i for piece in pieces if piece.queries for i in range(piece.key, piece.key + piece.keys)
    ]
    assert all(sum(before) != after[0] for before, after in pairwise(found.key_ranges))


SHARED_KEYS = [AttentionPiece(0, 4, 0, 4), AttentionPiece(4, 4, 0, 16)]


def test_rectangles_that_share_keys_each_have_their_own_and_on_the_cpu_there_are_only_tiles() -> (
    None
):
    with varlen_oracle():
        found = module.varlen_sequences(SHARED_KEYS, 1)
    assert found is not None and found.key_ranges == ((0, 4), (0, 16))
    assert device.is_accelerated() or packed_params().varlen is None


def test_torchs_own_operator_takes_what_it_is_given_also_when_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shapes and gradients, for fake tensors: no number."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    device._varlen_attn.cache_clear()
    try:
        kernel = device._varlen_attn()
    finally:
        device._varlen_attn.cache_clear()
    if kernel is None:
        pytest.skip("this torch has no attention of sequences of different lengths with windows")
    monkeypatch.setattr(module, "varlen_kernel", lambda: kernel)
    with FakeTensorMode():
        sequences = module.varlen_sequences(SHARED_KEYS, 2)
        sizes = ((8, HEADS, HEAD_DIM), (16, GROUPS, HEAD_DIM), (16, GROUPS, VALUES))
        states = [
            torch.empty(length, 2, *size, dtype=torch.bfloat16, requires_grad=True)
            for length, *size in sizes
        ]
        for reach in (None, 3):
            context = checkpoint(
                module.varlen_attention, *states, sequences, 0.5, reach, use_reentrant=False
            )
            assert context.shape == (8, 2, HEADS, VALUES) and context.dtype == torch.bfloat16
            grads = torch.autograd.grad(context.sum(), states)
            assert [x.shape for x in grads] == [x.shape for x in states]
