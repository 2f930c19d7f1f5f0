"""Models with recurrences under FSDP2: two steps are those of transformers, with padded and dynamic
batches, and what would let sequences mix is refused.
"""

from __future__ import annotations

import pytest

from megatron_policy.errors import ConfigError
from tests import margins
from tests.dist.cases import fsdp_config
from tests.dist.fsdp_cases import BATCHINGS
from tests.dist.layouts import SIZES
from tests.dist.shortcuts import refusal
from tests.dist.test_generate import assert_continued_like_hf, continue_prompts, generation
from tests.dist.test_hybrids import HYBRIDS, family_of
from tests.dist.test_invariance import (
    assert_microbatches_are_what_the_cell_says,
    compared,
    rows_of,
    tolerances,
)
from tests.invariance.cases import Cell, config_of
from tests.invariance.measure import run_cell

CELLS = (
    ("FSDP2 x 2", "padded", "token", "qwen3_next"),
    ("FSDP2 2x2 copies", "dynamic", "policy gradient", "qwen3_next"),
    ("FSDP2 x 2", "dynamic", "policy gradient", "nemotron_h"),
    ("FSDP2 x 4", "padded", "token", "nemotron_h"),
    ("FSDP2 x 2", "dynamic", "token", "lfm2"),
    ("FSDP2 x 4", "padded", "policy gradient", "lfm2"),
    ("FSDP2 TP2 x 2", "padded", "token", "qwen3_next"),
    ("FSDP1 x 2", "padded", "token", "nemotron_h"),
    ("FSDP1 x 2", "dynamic", "token", "qwen3_next"),
)


@pytest.mark.parametrize("given", CELLS, ids=", ".join)
def test_two_steps_are_those_of_transformers(ranks, checkpoint, given: tuple[str, ...]) -> None:
    cell = Cell(*given)
    path = checkpoint(cell.family, **SIZES)
    config, rows = config_of(cell, path), rows_of(cell, path)
    results = ranks.run(cell.of.world, run_cell, cell, config, rows)
    assert_microbatches_are_what_the_cell_says(cell, results)
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)


@pytest.mark.parametrize("model", HYBRIDS)
def test_what_lets_sequences_mix_is_refused(ranks, checkpoint, model: str) -> None:
    path = checkpoint(family_of(model), **HYBRIDS[model])
    packed = fsdp_config(path, {}, **BATCHINGS["packed"])
    split = fsdp_config(path, {"context_parallel_size": 2}, **BATCHINGS["padded"])
    for number, config, key in ((1, packed, "sequence_packing"), (2, split, "context_parallel")):
        for said in ranks.run(number, refusal, config, ConfigError):
            assert key in said and "needs layers that mix tokens in transformers' attention" in said


@pytest.mark.nightly
@pytest.mark.parametrize("model", HYBRIDS)
def test_prompts_are_continued_as_transformers_does(ranks, checkpoint, model: str) -> None:
    """With the states of its own layers in a cache."""
    path = checkpoint(family_of(model), **HYBRIDS[model])
    config = fsdp_config(path, {}, **generation())
    for seen in ranks.run(2, continue_prompts, config, None, True):
        assert_continued_like_hf(path, seen)
