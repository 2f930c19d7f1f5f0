"""Attention of padded and packed sequences, on one rank and on several context-parallel ones,
equals attention of each sequence alone, forward and backward.

Shapes: B rows and S positions of the caller; C ranks, T positions and R rows of one of them; N
query heads, G key-value groups, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.attention.tile_attention import BLOCK
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.engines.megatron.layers.sequences import sequence_params
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.packing.tokens import TokenLayout, packed_layout, padded_layout
from tests.exact import Exact, assert_equal
from tests.varlen_oracle import varlen_oracle

HEADS, HEAD_DIM = 4, 8
LENGTHS = (1, 13, 24, 0, 7, 2)
LONG = (1, 2 * BLOCK + 40)


@dataclass(frozen=True)
class Variant:
    """A kind of attention; `reach` is that of its window, `values` the size of a value's head."""

    groups: int = HEADS
    values: int = HEAD_DIM
    reach: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = LENGTHS


VARIANTS = {
    "plain": Variant(),
    "grouped": Variant(groups=2),
    "windowed": Variant(reach=5, groups=1),
    "a window of one": Variant(reach=0),
    "a window as long as the longest": Variant(reach=23),
    "softcapped": Variant(softcap=1.5, groups=2),
    "sinks": Variant(sinks=True, groups=2),
    "sinks and window": Variant(sinks=True, reach=5),
    "softcap and window": Variant(softcap=1.5, reach=9),
    "smaller values": Variant(values=5),
    "larger values in a window": Variant(values=11, reach=6),
    "longer than a block of queries": Variant(reach=40, groups=2, lengths=LONG),
    "softcapped, longer than a block": Variant(reach=600, softcap=1.5, lengths=LONG),
}


def attention_of(variant: Variant) -> TorchAttention:
    """The module, its sinks the same wherever it is made."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=variant.groups,
        kv_channels=HEAD_DIM,
        attention_dropout=0.0,
        window_size=None if variant.reach is None else (variant.reach, 0),
    )
    attention = TorchAttention(
        config, 1, AttnMaskType.causal, "self", softcap=variant.softcap, sinks=variant.sinks
    )
    if attention.softmax_offset is not None:
        attention.softmax_offset.data.copy_(torch.linspace(-1, 2, HEADS))
    return attention


def states_of(variant: Variant) -> list[torch.Tensor]:
    """Queries, keys, values, and the weight of each output in the loss, all `[B, S, heads, size]`:
    none counts beyond its sequence.
    """
    draw = torch.Generator().manual_seed(0)
    rows, width = len(variant.lengths), max(variant.lengths)
    sizes = [(HEADS, HEAD_DIM), (variant.groups, HEAD_DIM), (variant.groups, variant.values)]
    states = [torch.randn(rows, width, *size, generator=draw) for size in sizes]
    weights = torch.randn(rows, width, HEADS, variant.values, generator=draw)
    inside = torch.arange(width) < torch.tensor(variant.lengths).unsqueeze(1)
    return [*states, weights * inside[..., None, None]]


@cache
def reference(variant: Variant) -> list[Exact]:
    """Context `[B, S, N, H]` and all gradients, sequence by sequence, every score explicit."""
    rounded, exact = (_reference(variant, dtype) for dtype in (torch.float32, torch.float64))
    return list(map(Exact.between, rounded, exact))


def _reference(variant: Variant, dtype: torch.dtype) -> list[torch.Tensor]:
    *states, weights_BSNH = (x.to(dtype) for x in states_of(variant))
    leaves = [x.requires_grad_() for x in states]
    sinks = attention_of(variant).to(dtype).softmax_offset
    context_BSNH = torch.zeros_like(weights_BSNH)
    for row, length in enumerate(variant.lengths):
        query, key, value = (x[row, :length].transpose(0, 1) for x in leaves)
        context_BSNH[row, :length] = _alone(variant, query, key, value, sinks).transpose(0, 1)
    (context_BSNH * weights_BSNH).sum().backward()
    grads = [x.grad for x in leaves] + [x.grad for x in (sinks,) if x is not None]
    return [context_BSNH.detach(), *grads]


def _alone(variant: Variant, query: Any, key: Any, value: Any, sinks: Any) -> torch.Tensor:
    shared, length = HEADS // variant.groups, query.size(1)
    key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
    scores = query @ key.mT / HEAD_DIM**0.5
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    back = torch.arange(length).unsqueeze(1) - torch.arange(length)
    hidden = back < 0 if variant.reach is None else (back < 0) | (back > variant.reach)
    powers = scores.masked_fill(hidden, float("-inf")).exp()
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return powers / total @ value


def layout_of(kind: str, lengths: tuple[int, ...], ranks: int) -> TokenLayout:
    zigzag = 2 * ranks if ranks > 1 else 1
    if kind == "padded":
        return padded_layout(len(lengths), max(lengths), zigzag, ranks)
    return packed_layout(lengths, max(lengths), zigzag, 3 * zigzag, ranks)


def take(layout: TokenLayout, values_BSNH: torch.Tensor, rank: int) -> torch.Tensor:
    """`TokenLayout.take` of something with heads."""
    flat = values_BSNH.flatten(2).unbind(-1)
    shape = values_BSNH.shape[2:]
    return torch.stack([layout.take(part, rank) for part in flat], -1).unflatten(-1, shape)


def put(layout: TokenLayout, values_TR: torch.Tensor) -> torch.Tensor:
    """Every rank's values at the caller's places."""
    everyones = values_TR.new_empty(layout.full_length, *values_TR.shape[1:])
    dist.all_gather_into_tensor(everyones, values_TR.contiguous())
    return layout.put(everyones.unflatten(0, layout.columns_CT.shape))


def attend(kind: str, kernel: str) -> dict[str, list[torch.Tensor]]:
    """As `reference`, each variant by all ranks together, in tiles or if possible in one call."""
    prepare_platform()
    join_process_group(60.0)
    if kernel == "one call":
        return {name: _attend_in_one_call(kind, variant) for name, variant in VARIANTS.items()}
    return {name: _attend(kind, variant) for name, variant in VARIANTS.items()}


def _attend_in_one_call(kind: str, variant: Variant) -> list[torch.Tensor]:
    with varlen_oracle() as oracle:
        found = _attend(kind, variant)
    explicit = variant.softcap is not None or variant.sinks
    # Padded rows on one rank are one tile unless there is a window.
    tile = kind == "padded" and dist.get_world_size() == 1 and variant.reach is None
    assert oracle.calls == (0 if explicit or tile else 1), oracle.calls
    return found


def _attend(kind: str, variant: Variant) -> list[torch.Tensor]:
    world = dist.group.WORLD
    layout = layout_of(kind, variant.lengths, world.size())
    *states, weights_TRNH = (take(layout, x, world.rank()) for x in states_of(variant))
    leaves = [x.requires_grad_() for x in states]
    attention = attention_of(variant)
    params = sequence_params(layout, world)
    context = attention(*leaves, None, packed_seq_params=params)
    context_TRNH = context.unflatten(-1, weights_TRNH.shape[2:])
    (context_TRNH * weights_TRNH).sum().backward()
    found = [put(layout, x) for x in (context_TRNH.detach(), *(x.grad for x in leaves))]
    if attention.softmax_offset is not None:
        dist.all_reduce(attention.softmax_offset.grad)
        found.append(attention.softmax_offset.grad)
    return found


@pytest.fixture(
    scope="module", params=list(product((1, 2, 4), ("padded", "packed"), ("tiles", "one call")))
)
def attended(request, ranks) -> list[dict[str, list[torch.Tensor]]]:
    """What each rank makes of every variant."""
    world, *how = request.param
    everyones: list[dict[str, list[torch.Tensor]]] = ranks.run(world, attend, *how)
    return everyones


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_of_many_sequences_equals_that_of_each_alone(attended, name: str) -> None:
    variant = VARIANTS[name]
    context, *grads = reference(variant)
    inside = torch.arange(max(variant.lengths)) < torch.tensor(variant.lengths).unsqueeze(1)
    # Gradients of one attention are made of the same products: the largest of so few draws.
    rounding = max(each.rounding for each in grads)
    for seen in attended:
        found, *found_grads = seen[name]
        assert_equal("attention", found[inside], context[inside])
        for mine, theirs in zip(found_grads, grads, strict=True):
            assert_equal("gradients of attention", mine, Exact(theirs.value, rounding))


def attend_without_params() -> list[torch.Tensor]:
    prepare_platform()
    join_process_group(60.0)
    query, key, value, _ = (x.transpose(0, 1) for x in states_of(Variant()))
    attention = attention_of(Variant())
    attention.config.context_parallel_size = 2
    return [attention(query, key, value, None), attention(query[-1:], key, value, None)]


def test_without_params_every_context_parallel_rank_attends_to_whole_rows(ranks) -> None:
    """As generation with a cache does, whose next query sees all of it."""
    for whole, last in ranks.run(2, attend_without_params):
        expected, *_ = reference(Variant(lengths=(24,) * len(LENGTHS)))
        heads = expected.value.shape[2:]
        assert_equal("attention", whole.transpose(0, 1).unflatten(2, heads), expected)
        assert_equal("attention", last.transpose(0, 1).unflatten(2, heads), expected[:, -1:])
