"""Models whose layers hand a state on, some of which are not offered yet: their logits, and two
steps of training under every kind of layout and batching, are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_policy.converters.registry import FAMILIES, PREPARED
from tests import margins
from tests.checkpoints import make_checkpoint
from tests.dist.cases import logits_of
from tests.dist.layouts import SIZES
from tests.dist.test_invariance import (
    assert_microbatches_are_what_the_cell_says,
    compared,
    rows_of,
    tolerances,
)
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES
from tests.invariance.cases import Cell, config_of
from tests.invariance.measure import run_cell
from tests.samples import RECURRENT, Fields, Samples

NOT_OFFERED = {
    "qwen3_next": Samples(
        architecture="Qwen3NextForCausalLM",
        experts=True,
        head_dim=True,
        tiny={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_only_layers": [0],
        },
        read=(),
        published={},
        ranges={"norm": (-0.5, 0.5), "linear_attn.norm": (0.5, 1.5)} | RECURRENT,
    ),
    "nemotron_h": Samples(
        architecture="NemotronHForCausalLM",
        epsilon="layer_norm_epsilon",
        head_dim=True,
        tiny={
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "n_groups": 4,
            "ssm_state_size": 6,
        },
        read=(),
        published={},
        ranges=RECURRENT,
    ),
}
HYBRIDS: dict[str, Fields] = {
    "lfm2": SIZES | {"conv_bias": True},
    "qwen3_next": SIZES,
    "nemotron_h": SIZES,
}
"""Families with the keywords of their checkpoints."""
LAYOUTS = (
    ("one process", "padded", "token"),
    ("one process", "packed", "policy gradient"),
    ("TP2", "padded", "token"),
    ("TP2+SP", "packed", "policy gradient"),
    ("PP2", "dynamic", "token"),
    ("PP2xVPP2", "packed", "token"),
    ("CP2", "padded", "token"),
    ("CP4", "packed", "policy gradient"),
    ("TP4 over 2 key-value groups", "packed", "token"),
    ("TP2xCP2+SP", "packed", "token"),
)
WITH_EXPERTS = (
    *(each for each in LAYOUTS if each[0] not in ("TP2", "TP4 over 2 key-value groups")),
    ("EP2xTP2+SP", "padded", "token"),
    ("EP2xCP2", "packed", "policy gradient"),
)
"""Tensor-parallel ranks share experts with sequence parallelism alone."""
DAILY = {("TP2+SP", "lfm2"), ("TP2+SP", "qwen3_next"), ("CP2", "nemotron_h")}


@pytest.fixture(autouse=True)
def offered() -> Iterator[None]:
    with patch.dict(FAMILIES, PREPARED), patch.dict(SAMPLES, NOT_OFFERED):
        yield


def run_offered(run: Callable[..., Any], *args: Any) -> Any:
    """`run` on a rank that takes these families."""
    with patch.dict(FAMILIES, PREPARED):
        return run(*args)


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_are_those_of_transformers(ranks, tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "hf", family, tokenizer=False, **HYBRIDS[family])
    for length in (1, 31):
        tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(0))
        ((logits,),) = ranks.run(1, run_offered, logits_of, [(path, SIZES["vocab"])], tokens)
        assert_equal("logits", logits, Exact.of(path, lambda m, t=tokens: m(t).logits), length)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            Cell(layout, batching, loss, family),
            id=f"{family}, {layout}, {batching}",
            marks=[pytest.mark.nightly] * ((layout, family) not in DAILY),
        )
        for family in HYBRIDS
        for layout, batching, loss in (WITH_EXPERTS if family == "qwen3_next" else LAYOUTS)
    ],
)
def test_two_steps_are_those_of_transformers(ranks, checkpoint, cell: Cell) -> None:
    path = checkpoint(cell.family, **HYBRIDS[cell.family])
    given = (run_cell, cell, config_of(cell, path), rows_of(cell, path))
    results = ranks.run(cell.of.world, run_offered, *given)
    assert_microbatches_are_what_the_cell_says(cell, results)
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)
