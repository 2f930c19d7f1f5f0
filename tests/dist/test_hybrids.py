"""Models whose layers hand a state on, their logits, and two steps of training under
every kind of layout and batching, are those of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.recurrence.chunks import SIZE as CHUNK
from tests import margins, oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import LOSSES, logits_of, open_policy, policy_config
from tests.dist.layouts import SIZES
from tests.dist.test_generate import assert_continued_like_hf, continue_prompts, generation
from tests.dist.test_invariance import (
    assert_microbatches_are_what_the_cell_says,
    compared,
    rows_of,
    tolerances,
)
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES
from tests.invariance import page
from tests.invariance.cases import CLOSEST, Cell, config_of
from tests.invariance.cases import LAYOUTS as CASES
from tests.invariance.further import (
    HYBRIDS_TABLE,
    LAYOUTS,
    WITH_EXPERTS,
    Collected,
    FurtherCell,
)
from tests.invariance.measure import run_cell
from tests.invariance.oracle import truth
from tests.samples import Fields

DENSE = ["linear_attention", "mlp", "full_attention", "linear_attention"]
UNEVEN = ["moe", "linear_attention", "full_attention", "moe", "mlp", "linear_attention"]
LATENT = ["moe", "linear_attention", "full_attention", "moe"]
HYBRIDS: dict[str, Fields] = {
    "falcon_h1": SIZES,
    "kimi_linear": SIZES,
    "lfm2": SIZES | {"conv_bias": True},
    "lfm2_moe": SIZES | {"conv_bias": True},
    "qwen3_next": SIZES | {"attention_bias": True},
    "qwen3_5_text": SIZES | {"attention_bias": True},
    "qwen3_5_moe_text": SIZES,
    "nemotron_h": SIZES | {"layers_block_type": DENSE},
    "nemotron_h, experts": SIZES | {"layers_block_type": UNEVEN},
    "nemotron_h, latent experts": SIZES | {"layers_block_type": LATENT, "moe_latent_size": 20},
    "olmo_hybrid": SIZES | {"attention_bias": True},
    "granitemoehybrid": SIZES | {"num_local_experts": 0},
    "granitemoehybrid, experts": SIZES
    | {"position_embedding_type": "rope", "mamba_proj_bias": True},
}
"""Models, whose names begin with those of their families, with the keywords of their checkpoints.
The weights are such that no token is about to take another expert.
"""
FAMILIES = [model for model in HYBRIDS if model in SAMPLES]
REFUSED = {("olmo_hybrid", "TP4 over 2 key-value groups")}
"""Each rank would normalise keys of which others have parts too."""
DAILY = {
    ("kimi_linear", "CP2"),
    ("lfm2", "TP2+SP"),
    ("olmo_hybrid", "FSDP2 x 2"),
    ("qwen3_next", "TP2+SP"),
    ("nemotron_h", "CP2"),
    ("nemotron_h, latent experts", "EP2xTP2+SP"),
    ("falcon_h1", "TP2xCP2+SP"),
    ("granitemoehybrid", "TP2xCP2+SP"),
}
GENERATED_DAILY = ("qwen3_next", "PP2xVPP2")
PACKED_DAILY = ("qwen3_next", "CP4")


def family_of(model: str) -> str:
    return model.partition(",")[0]


def has_experts(model: str) -> bool:
    alone = ("kimi_linear", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text")
    return "experts" in model or model in alone


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(HYBRIDS_TABLE)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


@pytest.mark.parametrize("model", HYBRIDS)
def test_logits_are_those_of_transformers(ranks, tmp_path: Path, model: str) -> None:
    given = HYBRIDS[model]
    path = make_checkpoint(tmp_path / "hf", family_of(model), tokenizer=False, **given)
    for length in (1, 31):
        tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(0))
        ((logits,),) = ranks.run(1, logits_of, [(path, SIZES["vocab"])], tokens)
        assert_equal("logits", logits, Exact.of(path, lambda m, t=tokens: m(t).logits), length)


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        pytest.param(
            model,
            Cell(layout, batching, loss, family_of(model)),
            id=f"{model}, {layout}, {batching}",
            marks=[pytest.mark.daily] * ((model, layout) in DAILY),
        )
        for model in HYBRIDS
        for layout, batching, loss in (WITH_EXPERTS if has_experts(model) else LAYOUTS)
        if (model, layout) not in REFUSED
    ],
)
def test_two_steps_are_those_of_transformers(
    ranks, checkpoint, measured, model: str, cell: Cell
) -> None:
    path = checkpoint(cell.family, **HYBRIDS[model])
    given = (run_cell, cell, config_of(cell, path), rows_of(cell, path))
    results = ranks.run(cell.of.world, *given)
    assert_microbatches_are_what_the_cell_says(cell, results)
    assert not has_experts(model) or truth(cell, path).closest > CLOSEST
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)
    differences = {name: (value, allowed[name]) for name, value in found.items()}
    measured.add(FurtherCell(cell.layout, cell.batching, cell.loss, model), differences)


def every(models: Iterable[str], layouts: tuple[str, ...], daily: tuple[str, str]) -> list[Any]:
    """Each of these hybrids under each of these layouts."""
    found = [(model, layout) for model in models for layout in layouts]
    return [pytest.param(*each, marks=[pytest.mark.daily] * (each == daily)) for each in found]


GENERATING = ("one process", "TP2+SP", "PP2xVPP2", "CP2")


@pytest.mark.parametrize(("model", "layout"), every(HYBRIDS, GENERATING, GENERATED_DAILY))
def test_greedy_continuations_are_those_of_transformers(
    ranks, checkpoint, model: str, layout: str
) -> None:
    path, case = checkpoint(family_of(model), **HYBRIDS[model]), CASES[layout]
    given = (continue_prompts, policy_config(path, case.megatron, **generation()), None, True)
    for seen in ranks.run(case.world, *given):
        assert_continued_like_hf(path, seen)


LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 1, 3, 1, 13, 2, 7, 30, 1, 5, 9, 2, 4, 1, 21, 6, 3, 8)
"""Of twenty sequences: most are shorter than the pieces into which context-parallel ranks cut."""
TOKENS = 1024
"""Of a microbatch: more than all of them have, however they are padded."""
NOT_COUNTED, LEFT_OUT = 6, 9
"""The row none of whose tokens count, and the one that does not count."""


def twenty() -> BatchedDataDict:
    random = torch.Generator().manual_seed(5)
    lengths, width = torch.tensor(LENGTHS), max(LENGTHS)
    inside = torch.arange(width) < lengths.unsqueeze(1)
    mask, sample_mask = inside.long(), torch.ones(len(LENGTHS))
    mask[NOT_COUNTED], sample_mask[LEFT_OUT] = 0, 0.0
    tokens = torch.randint(1, SIZES["vocab"], (len(LENGTHS), width), generator=random)
    return BatchedDataDict(
        {
            "input_ids": torch.where(inside, tokens, 0),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": sample_mask,
        }
    )


def learn_twenty(config: dict[str, Any]) -> dict[str, Any]:
    """What a policy reads, and makes of all rows in one microbatch; weights by HF names."""
    data = twenty()
    texts = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
    with open_policy(config, init_reference_model=False) as policy:
        seen = {"logprobs": policy.logprobs(texts)}
        seen["step"] = policy.train(data, LOSSES["token"](), gbs=len(LENGTHS))
        return seen | {"weights": {name: each.clone() for name, each in policy.export()}}


PACKING = ("one process", "TP2+SP", "CP4", "TP2xCP2+SP")


@pytest.mark.parametrize(("model", "layout"), every(FAMILIES, PACKING, PACKED_DAILY))
def test_twenty_sequences_of_a_row_are_apart_however_short_they_are(
    ranks, checkpoint, model: str, layout: str
) -> None:
    path, case, data = checkpoint(family_of(model), **HYBRIDS[model]), CASES[layout], twenty()
    budget = {"enabled": True, "train_mb_tokens": TOKENS, "logprob_mb_tokens": TOKENS}
    sizes = {"train_global_batch_size": len(LENGTHS), "max_total_sequence_length": 2 * CHUNK}
    config = policy_config(path, case.megatron, sequence_packing=budget, **sizes)
    logprobs = Exact.of(path, lambda m: oracle.hf_logprobs(m, data["input_ids"]))
    hf = oracle.Learned.of(path, data, len(LENGTHS), oracle.token_level)
    inside = torch.arange(max(LENGTHS)) < data["input_lengths"].unsqueeze(1)
    for seen in ranks.run(case.world, learn_twenty, config):
        assert_equal("logprobs", seen["logprobs"][:, 1:][inside[:, 1:]], logprobs[inside[:, 1:]])
        assert len(seen["step"]["microbatch_metrics"]["valid"]) == 1
        hf.assert_same_steps([seen["step"]])
        hf.assert_same_weights(seen["weights"])
