"""Parts other than attention in the place of a mixer, and layers of one part: their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_policy.config.layout import check_layout
from megatron_policy.config.model_table import check_implementation
from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Attention,
    DeltaNet,
    Layer,
    Mamba2,
    Mlp,
    Moe,
    Rope,
    Scoring,
    ShortConvolution,
    stack,
)
from megatron_policy.converters.architecture.part import Kernels
from megatron_policy.converters.architecture.plain_values import plain
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.estimate.activations import LayerActivations, MicrobatchShape, count_slabs
from megatron_policy.estimate.flops import forward_flops
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.parallel.topology import Topology
from megatron_policy.recurrence.chunks import HELD, TOGETHER, Chunks, sequences_of
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.state_space import state_space
from tests.pure.test_layout import config

ATTENTION = Attention(
    num_attention_heads=16,
    num_query_groups=2,
    kv_channels=256,
    rope=Rope(1e7, fraction=0.25),
    attention_output_gate=True,
)
DELTA = DeltaNet(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, taps=4)
MAMBA = Mamba2(num_heads=64, head_dim=64, groups=8, state_size=128, taps=4)
SHORT = ShortConvolution(channels=2048, taps=3)
MLP = Mlp(ffn_hidden_size=5120)
MOE = Moe(
    experts=8,
    chosen=2,
    ffn_hidden_size=512,
    scoring=Scoring.SIGMOID,
    activation=Activation.SQUARED_RELU,
    gated=False,
    latent_size=1024,
    shared_ffn_hidden_size=256,
)


def hybrid(mixers: list[Any], feeds: Any = MLP, **changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "hidden_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "layernorm_epsilon": 1e-6,
        "tied": False,
    }
    return Architecture(layers=stack(len(mixers), mixers, feeds), **values | changes)


MODEL = hybrid([DELTA, DELTA, DELTA, ATTENTION])
SQUARED = replace(MLP, activation=Activation.SQUARED_RELU, gated=False)
SINGLE = hybrid([MAMBA, None, ATTENTION, None], [None, SQUARED, None, MOE])


def test_projections_and_convolutions_have_the_rows_of_their_sections() -> None:
    assert (DELTA.projected_size, DELTA.convolved_size, DELTA.inner_size) == (12352, 8192, 4096)
    assert (MAMBA.projected_size, MAMBA.convolved_size, MAMBA.inner_size) == (10304, 6144, 4096)
    assert (SHORT.projected_size, SHORT.convolved_size, SHORT.inner_size) == (6144, 2048, 2048)
    assert ATTENTION.gated_query_size == 2 * ATTENTION.query_size == 8192
    linears = {part: part.list_linears(2048) for part in (ATTENTION, DELTA, MAMBA, SHORT)}
    names = {part: [group[0].name for group in found] for part, found in linears.items()}
    assert names[DELTA] == names[SHORT] == ["self_attention.in_proj", "self_attention.out_proj"]
    assert names[MAMBA] == ["mixer.in_proj", "mixer.out_proj"]
    sizes = {part: [group[0].elements // 2048 for group in linears[part]] for part in linears}
    assert sizes == {
        ATTENTION: [9216, 4096],
        DELTA: [12352, 4096],
        MAMBA: [10304, 4096],
        SHORT: [6144, 2048],
    }


def test_what_generation_keeps_of_a_sequence_grows_with_attention_alone() -> None:
    assert DELTA.count_cached(1, 2) == DELTA.count_cached(10**6, 2) == 2 * 2**20 + 48 * 2**10
    assert MAMBA.count_cached(9, 2) == 3 * 6144 * 2 + 64 * 64 * 128 * 4
    assert SHORT.count_cached(9, 2) == 2 * 2048 * 2
    assert ATTENTION.count_cached(9, 2) == 9 * 2 * 512 * 2


def test_operations_on_states_grow_with_tokens_and_are_those_of_one_token_after_another() -> None:
    state = 32 * 128 * 128
    assert DELTA.count_core_flops([3, 4]) == 7 * (2 * 4 * 8192 + 6 * state)
    assert MAMBA.count_core_flops([7]) == 7 * (2 * 4 * 6144 + 4 * 64 * 64 * 128)
    assert SHORT.count_core_flops([7]) == 7 * 2 * 3 * 2048
    found = forward_flops(SINGLE, [7]).layers
    assert [layer.attention > 0 for layer in found] == [True, False, True, False]
    assert [layer.mlp > 0 for layer in found] == [False, True, False, True]
    # The router, both latent projections, both projections of two experts, the shared MLP.
    latent = 2048 * (8 + 2 * 1024) + 2 * 2 * 1024 * 512 + 2 * 2048 * 256
    assert found[3].total == 7 * 2 * latent


def scan_flops(part: DeltaNet | Mamba2, size: int) -> int:
    """What torch counts of a scan over 32 tokens, in chunks of `size`."""
    chunks = Chunks.of([range(32)], size)
    if isinstance(part, DeltaNet):
        heads, groups, inner = part.num_value_heads, part.num_key_heads, part.value_head_dim
        q, k = torch.rand(2, 32, groups, part.key_head_dim).unbind()
        per_head = torch.rand(32, heads)
        with FlopCounterMode(display=False) as counter:
            delta_rule(q, k, torch.rand(32, heads, inner), -per_head, per_head, chunks)
    else:
        heads, groups, inner = part.num_heads, part.groups, part.head_dim
        b, c = torch.rand(2, 32, groups, part.state_size).unbind()
        head, steps = torch.rand(heads), torch.rand(32, heads)
        with FlopCounterMode(display=False) as counter:
            state_space(torch.rand(32, heads, inner), steps, head, b, c, head, chunks)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("part", [DELTA, MAMBA], ids=["delta net", "Mamba2"])
def test_operations_on_states_are_those_of_a_scan_but_for_pairs_within_its_chunks(part) -> None:
    # A token meets all of its chunk: their number is what chunks of another size differ by.
    small, large = scan_flops(part, 8), scan_flops(part, 16)
    assert 32 * part.count_memory_flops() == small - (large - small)


def test_a_sequence_costs_less_of_what_grows_where_fewer_layers_attend() -> None:
    length, pairs = 2**15, 2 * 2 * 4096
    attention, mlp = 2 * 2048 * (9216 + 4096), 2 * 3 * 2048 * 5120
    delta = 2 * 2048 * (12352 + 4096) + DELTA.count_core_flops([1])
    for number, model in ((4, hybrid([ATTENTION] * 4)), (1, MODEL)):
        each = number * attention + (4 - number) * delta + 4 * mlp
        expected = length * (1 + number * pairs / each * length)
        assert sequence_cost(model)(length) == pytest.approx(expected)
    assert sequence_cost(SINGLE)(length) > length


def layout(architecture: Architecture, **sizes: int) -> str:
    """What is said of a layout that does not fit; "" if it does."""
    keys = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}
    parsed = config(
        sequence_parallel=sizes.get("tp", 1) > 1, **{keys[k]: n for k, n in sizes.items()}
    )
    try:
        check_layout(parsed, architecture, Topology(**sizes))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 16}, {"cp": 8}, {"tp": 4, "cp": 8}])
def test_ranks_that_divide_the_heads_of_all_mixers_share_them(sizes: dict[str, int]) -> None:
    assert layout(MODEL, **sizes) == ""


def test_ranks_that_do_not_are_refused_with_those_that_do() -> None:
    few = hybrid([replace(DELTA, num_key_heads=4), ATTENTION])
    said = layout(few, tp=8)
    assert "tensor_model_parallel_size=8 does not divide" in said
    assert "4 key heads of a delta net" in said and "use one of [1, 2, 4]" in said
    assert "context_parallel_size" not in said
    # Key heads can be fewer than ranks that exchange tokens for heads.
    assert layout(few, tp=4, cp=8) == ""
    said = layout(few, cp=3)
    assert re.search(
        r"context_parallel_size=3 with .*=1 shares 32 value heads of a delta net", said
    )
    assert "use one of [1, 2, 4, 8, 16, 32]" in said
    said = layout(hybrid([MAMBA, ATTENTION]), tp=2, cp=64)
    assert "64 heads of a Mamba2 layer" in said and "use one of [1, 2, 4, 8, 16, 32]" in said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layer(None, None), "neither a mixer nor a feed"),
        (lambda: hybrid([DELTA, MAMBA]), "no layer of the model has attention"),
        (lambda: hybrid([ATTENTION], [None]), "no layer of the model has an MLP or experts"),
        (lambda: replace(DELTA, num_value_heads=24), "24 value heads .* multiple of its 16 key"),
        (lambda: replace(MAMBA, groups=5), "64 heads of a Mamba2 layer .* its 5 groups"),
        (lambda: replace(SHORT, taps=0), "short_convolution.taps"),
        (lambda: hybrid([DELTA, replace(DELTA, taps=2), ATTENTION]), "DeltaNet parts of different"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        make()


def test_layers_that_predict_are_like_the_last_one_that_attends() -> None:
    model = hybrid([ATTENTION, DELTA, ATTENTION, DELTA], [MLP, MLP, MOE, MOE])
    assert model.find_layer(4) is model.layers[2]
    assert hybrid([ATTENTION, DELTA]).find_layer(2).mixer is ATTENTION


def test_plain_values_tell_kinds_of_layers_apart_and_those_of_attention_are_as_before() -> None:
    models = [MODEL, hybrid([DELTA, DELTA, ATTENTION, DELTA]), SINGLE]
    models += [hybrid([replace(DELTA, taps=3)] * 3 + [ATTENTION])]
    found = [str(plain(each)) for each in models]
    assert len(set(found)) == len(found)
    assert plain(MODEL)["mixers"] == ["DeltaNet"] * 3 + ["Attention"]
    same = plain(hybrid([replace(ATTENTION, attention_output_gate=False)] * 2))
    new = ("mixers", "without_feed", "delta_net", "mamba2", "attention_output_gate")
    assert same.keys().isdisjoint(new)


@pytest.mark.parametrize(("tp", "slabs"), [(1, 11), (2, 5)])
def test_a_scan_keeps_what_it_reads_and_gives_and_states_between_slabs(tp: int, slabs: int) -> None:
    tokens, width = 2**13, 2
    # Of two sequences, in 64 steps of two chunks. Half as many heads are computed in larger slabs.
    batch = MicrobatchShape(tokens, tokens // 2, tokens)
    kernels = Kernels(transformer_engine=False, fused_activation=False)
    kept = LayerActivations(MODEL, Topology(tp=tp), width, False, kernels).saved(0, batch).mixer
    projected, given = 12352 * width * tokens, 2 * 4096 * width * tokens
    convolved, steps = 8192 * width * (tokens + 2 * 3), 4 * 2 * 32 * tokens
    states = 4 * 2 * (slabs - 1) * DELTA.memory_size
    assert kept.inner == (projected + given + convolved + steps + states) // tp
    # What is computed again is not kept, but for a while it is held.
    assert kept.total == kept.kept(("core_attn",)) < kept.again(()) == kept.again(("core_attn",))
    single = LayerActivations(SINGLE, Topology(tp=tp), width, False, kernels)
    alone = [single.saved(number, batch) for number in range(4)]
    assert [each.mixer.total > 0 for each in alone] == [True, False, True, False]
    assert [each.feed.total > 0 for each in alone] == [False, True, False, True]
    assert all(each.again(()) >= each.total == each.kept(()) for each in alone)


@pytest.mark.parametrize("sequences", [1, 3, 8, 32, 33, 70])
@pytest.mark.parametrize("length", [1, 64, 65, 700, 64 * 33])
@pytest.mark.parametrize("together", [TOGETHER, 5])
def test_slabs_are_counted_as_scans_cut_them(sequences: int, length: int, together: int) -> None:
    cut = Chunks.of(sequences_of([length] * sequences), together=together).slabs
    batch = MicrobatchShape(sequences * length // 2, length, length)
    found = count_slabs(batch, 2, lambda slabs: slabs.chunks * HELD // together)
    if sequences * length % 2 == 0:
        assert found.sequences == sequences
        assert found.chunks == max(each.chunks.stop - each.chunks.start for each in cut)
        assert found.states == sum(each.live[0] for each in cut if not each.begins)


def test_transformer_engine_refuses_hybrids_with_what_it_lacks() -> None:
    for model, lacking in (
        (MODEL, "gated delta nets, gated attention"),
        (SINGLE, "Mamba2, gated attention, a mixer or a feed alone, squares of ReLU"),
    ):
        check_implementation("auto", model, adapted=False)
        with pytest.raises(ConfigError, match=f"this model's {lacking}; use"):
            check_implementation("transformer_engine", model, adapted=False)
