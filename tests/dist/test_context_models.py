"""Models of every kind of layer compute of padded and packed sequences, on one rank and on several
context-parallel ones, what transformers computes of each sequence alone, forward and backward.

Shapes: B rows and S positions of the caller; T positions and R rows of one rank; D model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split
from megatron_policy.converters.formats.hf_files import HfReader, read_config
from megatron_policy.converters.table import bind
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.build import build_chunks, make_embedding
from megatron_policy.engines.megatron.layers.rope import set_text_length
from megatron_policy.engines.megatron.layers.sequences import PromptCache, sequence_params
from megatron_policy.engines.megatron.model_config import LOCAL, transformer_config
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.engines.megatron.process_groups import drop_groups, make_groups
from megatron_policy.packing.tokens import TokenLayout, packed_layout, padded_layout
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement, Topology
from megatron_policy.weights.load import held_entries, load_parameters
from tests.dist.cases import policy_config
from tests.exact import Exact, InDouble, assert_equal, load_hf
from tests.families import SAMPLES

VOCAB, WIDTH = 200, 21
LENGTHS = (21, 1, 9, 16)
FAMILIES = {f: each.context for f, each in SAMPLES.items() if each.context is not None}
RANKS = {"one rank": (1, 1), "CP2": (1, 2), "TP2xCP2+SP": (2, 2)}
"""Tensor- and context-parallel ranks."""
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
SELECTIVE = {"activation_checkpointing": True, "recompute_granularity": "selective"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[B, S]` and the weight of each position's hidden state in the loss, by element."""
    draw = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(1, VOCAB, (len(LENGTHS), WIDTH), generator=draw)
    inside_BS = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    weights_BS = torch.randn(len(LENGTHS), WIDTH, generator=draw)
    return tokens_BS * inside_BS, weights_BS * inside_BS


def hf_states(path: Path) -> tuple[Exact, ...]:
    """Hidden states `[B, S, D]` of each sequence alone, and the gradient of the embedding."""
    rounded = _hf_states(load_hf(path))
    with InDouble():
        exact = _hf_states(load_hf(path, torch.float64))
    return tuple(map(Exact.between, rounded, exact))


def _hf_states(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BS, weights_BS = batch()
    hidden_BSD = torch.zeros(*tokens_BS.shape, model.config.hidden_size, dtype=model.dtype)
    for row, length in enumerate(LENGTHS):
        own = model.model(tokens_BS[row : row + 1, :length]).last_hidden_state
        hidden_BSD[row, :length] = own[0]
    loss_of(hidden_BSD, weights_BS).backward()
    return hidden_BSD.detach(), model.get_input_embeddings().weight.grad


def loss_of(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(-1, 1, hidden.size(-1)) * hidden * weights.unsqueeze(-1)).sum()


def layout_of(kind: str, tp: int, cp: int) -> TokenLayout:
    zigzag = 2 * cp if cp > 1 else 1
    multiple = zigzag * tp
    if kind == "padded":
        return padded_layout(len(LENGTHS), WIDTH, multiple, cp)
    return packed_layout(LENGTHS, WIDTH, zigzag, multiple, cp)


def model_of(config: PolicyConfig, topology: Topology) -> tuple[Any, Any, Groups]:
    """The only chunk of a pipeline of one stage, as `assemble` would build it, and what embeds."""
    table = bind(read_config(config.model_name))
    groups = make_groups(topology, 60.0)
    split = layer_split(config, table.architecture, topology)
    place = Placement(topology, topology.coords(dist.get_rank()), split)
    settings = config.megatron_cfg
    described = transformer_config(
        table.architecture, settings, topology, torch.float32, LOCAL, variable_lengths=True
    )
    (model,) = build_chunks(table.architecture, described, place, LOCAL, 0)
    with HfReader(config.model_name) as reader:
        load_parameters(held_entries([model], table, place), reader, table, place)
    return model, make_embedding([model], table.architecture), groups


def states(config: dict[str, Any], kind: str, tp: int, cp: int) -> tuple[torch.Tensor, ...]:
    """As `hf_states`, by all ranks of the world together."""
    prepare_platform()
    join_process_group(60.0)
    model, embed, groups = model_of(PolicyConfig.parse(config), Topology(tp=tp, cp=cp))
    try:
        tokens_BS, weights_BS = batch()
        layout, rank = layout_of(kind, tp, cp), groups.cp.rank()
        set_text_length([model], WIDTH)
        model.train().post_process = False
        tokens_RT = layout.take(tokens_BS, rank).T.contiguous()
        hidden_TRD = model(
            tokens_RT,
            None,
            None,
            embed(tokens_RT),
            packed_seq_params=sequence_params(layout, groups.cp),
        )
        share = layout.take(weights_BS, rank).tensor_split(hidden_share(model, groups))
        loss_of(hidden_TRD, share[groups.tp.rank() if len(share) > 1 else 0]).backward()
        grad = model.embedding.word_embeddings.weight.grad
        dist.all_reduce(grad, group=groups.cp)
        whole_TRD = gathered(hidden_TRD.detach(), groups.tp if len(share) > 1 else None)
        all_CTRD = gathered(whole_TRD, groups.cp).unflatten(0, layout.columns_CT.shape)
        return layout.put(all_CTRD), gathered(grad, groups.tp)[:VOCAB]
    finally:
        drop_groups()


def hidden_share(model: Any, groups: Groups) -> int:
    """Into how many parts the tensor-parallel ranks divide positions."""
    return groups.tp.size() if model.config.sequence_parallel else 1


def gathered(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The ranks' values one after another."""
    if group is None:
        return values
    everyones = values.new_empty(values.size(0) * group.size(), *values.shape[1:])
    dist.all_gather_into_tensor(everyones, values.contiguous(), group=group)
    return everyones


@pytest.fixture(scope="module")
def expected(checkpoint) -> Callable[[str], tuple[Path, Any, Any]]:
    """A family's checkpoint and what transformers computes of it, once."""

    @cache
    def of(family: str) -> tuple[Path, Any, Any]:
        path = checkpoint(family, vocab=VOCAB, **FAMILIES[family])
        return (path, *hf_states(path))

    return of


CASES = [
    (family, layout, kind, RECOMPUTED if kind == "packed" else {})
    for family in FAMILIES
    for layout, kind in (
        ("one rank", "packed"),
        ("CP2", "padded"),
        ("CP2", "packed"),
        *((("TP2xCP2+SP", "packed"),) * (not SAMPLES[family].expert_biases)),
    )
]
CASES += [
    (family, "CP2", "packed", SELECTIVE) for family in ("deepseek_v3", "gemma2", "qwen3_next")
]


@pytest.mark.parametrize(("family", "layout", "kind", "recomputed"), CASES)
def test_a_model_computes_each_sequence_as_transformers_does_alone(
    ranks, expected, family: str, layout: str, kind: str, recomputed: dict[str, Any]
) -> None:
    """Recomputation passes everything through Megatron-Core's checkpoints once more."""
    path, hidden, grad = expected(family)
    tp, cp = RANKS[layout]
    config = policy_config(path, {"sequence_parallel": tp > 1} | recomputed)
    inside = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    for found, found_grad in ranks.run(tp * cp, states, config, kind, tp, cp):
        assert_equal("hidden states", found[inside], hidden[inside])
        assert_equal("gradients", found_grad, grad)


WHOLE = {"runtime_gather_output": True}


def read_with_cache(config: dict[str, Any], prompt: int) -> torch.Tensor:
    """Hidden states `[B, S, D]`, read as generation does: the prompt, then token by token."""
    prepare_platform()
    join_process_group(60.0)
    model, embed, _ = model_of(PolicyConfig.parse(config), Topology(cp=dist.get_world_size()))
    try:
        tokens_BS, _ = batch()
        model.eval().post_process = False
        cached = PromptCache(*tokens_BS.shape)
        parts, start = [], 0
        for end in range(prompt, tokens_BS.size(1) + 1):
            part_BS = tokens_BS[:, start:end]
            with torch.no_grad():
                given = (part_BS, None, None, embed(part_BS))
                parts.append(model(*given, inference_context=cached, **WHOLE))
            cached.sequence_len_offset = start = end
            cached.enable_decode_mode()
        return torch.cat(parts).transpose(0, 1)
    finally:
        drop_groups()


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gpt_oss", "lfm2", "qwen3_next"])
def test_with_a_cache_every_context_parallel_rank_reads_the_whole_text(
    ranks, expected, family: str
) -> None:
    path, *_ = expected(family)
    tokens_BS, _ = batch()
    hidden = Exact.of(path, lambda m: m.model(tokens_BS).last_hidden_state)
    for found in ranks.run(2, read_with_cache, policy_config(path, {}), WIDTH - 3):
        assert_equal("hidden states", found, hidden)
