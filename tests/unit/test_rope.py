"""Rotary frequencies and factors against transformers' own, for every way of scaling them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.engines.megatron.layers.mla import MlaRotary
from megatron_policy.engines.megatron.layers.rope import (
    Rotary,
    attention_factor,
    columns,
    inverse_frequencies,
)
from megatron_policy.engines.megatron.layers.sequences import sequence_params
from megatron_policy.errors import ConversionError
from megatron_policy.packing.tokens import packed_layout
from tests.pure.test_rows import model
from tests.samples import LLAMA3

HEAD, LONGEST = 16, 64
FACTORS = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(HEAD // 2)],
    "long_factor": [1.0 + 0.7 * pair for pair in range(HEAD // 2)],
}
YARN = {"rope_type": "yarn", "factor": 8.0}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, **FACTORS}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "yarn": YARN | {"factor": 4.0},
    "yarn of a longer text": YARN
    | {"original_max_position_embeddings": 2048, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn untruncated": YARN | {"factor": 4.0, "truncate": False, "beta_fast": 9.0},
    "yarn with mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with one mscale": YARN | {"mscale": 0.7},
    "yarn with a factor": YARN | {"attention_factor": 1.25},
    "longrope": LONGROPE,
    "longrope with a factor": LONGROPE | {"attention_factor": 1.5},
    "longrope within its length": LONGROPE | {"factor": 1.0},
}


def config_of(scaling: dict[str, Any], **fields: Any) -> Any:
    return AutoConfig.for_model(
        "llama",
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=LONGEST,
        rope_theta=5e4,
        rope_scaling=dict(scaling),
        **fields,
    )


def rope_and_config(path: Path, scaling: dict[str, Any]) -> tuple[Rope, Any]:
    """What a llama config comes to, and the config as transformers reads it."""
    config_of(scaling).save_pretrained(path)
    return bind(read_config(path)).architecture.mixer.rope, AutoConfig.from_pretrained(path)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factor_are_those_of_transformers_and_no_others(
    tmp_path: Path, name: str
) -> None:
    rope, config = rope_and_config(tmp_path, SCALINGS[name])
    kind, found = SCALINGS[name]["rope_type"], {}
    for length in (10, LONGEST, LONGEST + 1, 3 * LONGEST):
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        found[length] = inverse_frequencies(rope, HEAD, length)
        torch.testing.assert_close(found[length], frequencies, rtol=1e-6, atol=0)
        assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)
    changes = not torch.equal(found[LONGEST], found[LONGEST + 1])
    assert changes == (kind in ("dynamic", "longrope"))
    assert not torch.equal(found[LONGEST + 1], inverse_frequencies(Rope(5e4), HEAD))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_a_part_of_a_head_is_rotated_as_transformers_does(tmp_path: Path, kind: str) -> None:
    rope, _ = rope_and_config(tmp_path, SCALINGS[kind])
    half = config_of(SCALINGS[kind], partial_rotary_factor=0.5)
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](half, torch.device("cpu"), seq_len=100)
    ours = inverse_frequencies(dataclasses.replace(rope, fraction=0.5), HEAD, 100)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
    assert len(ours) == HEAD // 4


def test_each_layer_cuts_out_the_angles_of_its_own_rope() -> None:
    whole, windowed = Rope(1e6, fraction=0.5), Rope(1e3, interleaved=True)
    attention = model(kv_channels=8, rope=whole).mixer
    narrow = replace(attention, rope=windowed, window=4)
    mixers = [narrow, attention, replace(narrow, rope=None)]
    ropes = model(num_layers=3, mixers=mixers).ropes
    rotary = Rotary(ropes, attention.kv_channels)
    angles = rotary(5)
    assert angles.shape == (5, 1, 1, 8 + 4) and angles.dtype == torch.float32
    once = torch.outer(torch.arange(5.0), inverse_frequencies(windowed, 8))
    mine = angles[:, 0, 0, columns(mixers[0], ropes)]
    assert torch.equal(mine, torch.stack([once, once], -1).flatten(1))
    once = torch.outer(torch.arange(5.0), inverse_frequencies(whole, 8))
    assert torch.equal(angles[:, 0, 0, columns(mixers[1], ropes)], torch.cat([once, once], 1))
    assert columns(mixers[2], ropes) is None


def test_padding_does_not_make_a_text_longer(tmp_path: Path) -> None:
    rope, _ = rope_and_config(tmp_path, SCALINGS["dynamic"])
    rotary = Rotary((rope,), HEAD)
    padded, long = LONGEST + 8, rotary(LONGEST + 8)
    rotary.text_length = LONGEST
    assert rotary.depends_on_length
    assert torch.equal(rotary(padded)[:LONGEST], rotary(LONGEST))
    assert not torch.equal(rotary(padded), long)


@pytest.mark.parametrize("name", ["llama3", "dynamic"])
def test_tokens_of_packed_sequences_are_turned_by_their_places_in_them(
    tmp_path: Path, name: str
) -> None:
    rope, _ = rope_and_config(tmp_path, SCALINGS[name])
    rotary = Rotary((rope, dataclasses.replace(rope, interleaved=True)), HEAD)
    layout = packed_layout([5, LONGEST + 9, 1], LONGEST + 9, 4, 4, 2)
    params = sequence_params(layout, SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    wanted = rotary.get_rotary_seq_len(None, None, None, None, packed_seq_params=params)
    # Unless told otherwise, a text is as long as the longest of them with its filler.
    table = rotary(LONGEST + 12)
    expected = table[[0, 1, 6, 7, *range(19), *range(57, 76), 0, 3]]
    assert torch.equal(rotary(wanted), expected)
    rotary.text_length = LONGEST
    table = rotary(LONGEST + 12)
    assert torch.equal(rotary(wanted), table[params.positions_TR[:, 0]])
    assert torch.equal(rotary(wanted), expected) != rotary.depends_on_length


@pytest.mark.parametrize(
    "rotary", [Rotary((Rope(1e4),), HEAD), MlaRotary(Rope(1e4), HEAD)], ids=["plain", "mla"]
)
def test_positions_are_never_counted_by_a_rank_that_holds_part_of_them(rotary: Any) -> None:
    split = SimpleNamespace(context_parallel_size=2)
    with pytest.raises(AssertionError, match="needs to know its sequences"):
        rotary.get_rotary_seq_len(None, SimpleNamespace(input_tensor=None), torch.zeros(4), split)


def test_a_scaling_that_cannot_be_honoured_is_refused_by_name() -> None:
    short = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
    for scaling, said in (
        ({"rope_type": "linear", "factor": "2"}, "factor = '2': must be a positive number"),
        ({"rope_type": "yarn", "factor": 0.0}, "factor = 0.0: must be a positive number"),
        ({"rope_type": "dynamic"}, "factor, which this model family needs"),
        ({"rope_type": "proportional", "factor": 2.0}, "rope_type = 'proportional'"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_medium": 3}, "beta_medium = 3: unknown"),
        (short, "short_factor has 1 numbers; heads of 16 have 8 rotated pairs"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ):
        raw = config_of(YARN).to_dict() | {"rope_parameters": {"rope_theta": 1e4} | scaling}
        raw.pop("rope_scaling", None)
        with pytest.raises(ConversionError) as caught:
            bind(raw)
        assert said in str(caught.value)
