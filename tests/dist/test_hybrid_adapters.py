"""Adapters on projections of recurrences, trained as PEFT and torch do, saved and converted; and
scalar heads of models with recurrences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, open_policy
from tests.dist.layouts import LAYOUTS, LENGTH, SIZES, VOCAB, layout
from tests.dist.test_adapter_conversion import assert_goes_there_and_back
from tests.dist.test_adapters import STEPS, adapted, of_peft, train
from tests.dist.test_hybrids import HYBRIDS
from tests.dist.test_scalar_heads import assert_values_and_scores, heads
from tests.exact import Exact, assert_equal

__all__ = ["heads"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
KINDS = {
    "delta net": of_peft("qwen3_next", [*DELTA, *ATTENTION]),
    "delta net, some": of_peft("qwen3_next", ["in_proj_ba", "q_proj", "v_proj"]),
    "delta net, fused": replace(
        of_peft("qwen3_next", ["in_proj", "linear_qkv"], [*DELTA[:2], *ATTENTION[:3]], shared=True),
        load=partial(peft_models.Loads, shared=True),
    ),
    "channel delta net": of_peft(
        "kimi_linear",
        [
            *("q_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
            *("o_proj", "shared_experts.down_proj"),
        ],
    ),
    "separate delta net": of_peft("olmo_hybrid", ["q_proj", "a_proj", "g_proj", "o_proj"]),
    "Mamba2": of_peft("nemotron_h", ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"]),
    "short convolution": of_peft("lfm2", ["in_proj", "out_proj", "w1", "w2"]),
}
SIZES_OF = {"nemotron_h": HYBRIDS["nemotron_h"]}
"""Models without experts, whose adapters PEFT knows by other names."""
CP2 = layout(2, context_parallel_size=2)
CASES = {
    "delta net, TP2+SP": ("delta net", LAYOUTS["TP2+SP"]),
    "delta net, CP2": ("delta net", CP2),
    "delta net, PP2xVPP2": ("delta net", LAYOUTS["PP2xVPP2"]),
    "delta net, some, TP2+SP": ("delta net, some", LAYOUTS["TP2+SP"]),
    "delta net, fused, TP2+SP": ("delta net, fused", LAYOUTS["TP2+SP"]),
    "delta net, fused, one process": ("delta net, fused", LAYOUTS["one process"]),
    "channel delta net, TP2+SP": ("channel delta net", LAYOUTS["TP2+SP"]),
    "channel delta net, CP2": ("channel delta net", CP2),
    "separate delta net, TP2": ("separate delta net", LAYOUTS["TP2"]),
    "Mamba2, TP2": ("Mamba2", LAYOUTS["TP2"]),
    "Mamba2, TP2xCP2+SP": ("Mamba2", LAYOUTS["TP2xCP2+SP"]),
    "short convolution, TP2": ("short convolution", LAYOUTS["TP2"]),
    "short convolution, DP2, overlaps": (
        "short convolution",
        LAYOUTS["DP2 distributed optimizer, both overlaps"],
    ),
}


TOKENS = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)["input_ids"]


def export_adapters(config: dict[str, Any], path: Path) -> torch.Tensor:
    with open_policy(config, init_reference_model=False) as policy:
        policy.export_peft(path)
        return policy.logprobs(BatchedDataDict({"input_ids": TOKENS}))


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_trained_like_pefts_by_torchs_optimizer(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    kind, case = CASES[name]
    of = KINDS[kind]
    path = checkpoint(of.family, **SIZES_OF.get(of.family, SIZES))
    start = of.make(path, tmp_path / "start")
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    hf = oracle.Learned.of(
        path, data, GLOBAL_BATCH, oracle.token_level, own=of.own, load=of.load(start)
    )
    names = {n: of.saved(n) for n in hf.exact.weights if of.own(n) is not None}
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    config = adapted(path, case.megatron, start, target_modules=of.modules)
    for seen in ranks.run(case.world, train, config, data):
        hf.assert_same_steps(seen["steps"])
        assert torch.equal(seen["base"], seen["reference"])
        assert names
        for weight, saved in names.items():
            hf.assert_same_weight(seen["adapters"][saved], hf.exact.weights[weight], weight)
        assert_equal("logprobs after training", seen["logprobs"][:, 1:], hf.read(read))
        assert_equal("logprobs of the base", seen["base"][:, 1:], Exact.of(path, read))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "name", "peft"),
    [
        ("qwen3_next", "TP2+SP", {"target_modules": ["in_proj", "linear_qkv", "out_proj"]}),
        ("nemotron_h", "TP2", {}),
        ("nemotron_h", "PP2", {"target_modules": ["in_proj", "q_proj"]}),
        ("lfm2", "TP2+SP", {}),
    ],
)
def test_what_a_policy_saves_becomes_what_it_exports_and_back(
    ranks, checkpoint, tmp_path: Path, family: str, name: str, peft: dict[str, Any]
) -> None:
    path = checkpoint(family, **SIZES_OF.get(family, SIZES))
    assert_goes_there_and_back(ranks, path, tmp_path, name, peft, {})


@pytest.mark.nightly
def test_peft_reads_what_is_exported_of_mamba2(ranks, checkpoint, tmp_path: Path) -> None:
    """Under the names of its modules, which are not those of files. It refuses `out_proj`."""
    path = checkpoint("nemotron_h", **SIZES_OF["nemotron_h"])
    config = adapted(path, {}, None, target_modules=["in_proj", "q_proj", "down_proj"])
    config["megatron_cfg"]["peft"]["lora_B_init_method"] = "normal"
    (logprobs,) = ranks.run(1, export_adapters, config, tmp_path / "peft")
    exact = peft_models.logprobs(path, tmp_path / "peft", TOKENS)
    assert_equal("logprobs of peft", logprobs[:, 1:], exact)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "batching", "kind"),
    [("TP2xCP2+SP", "packed", "regression"), ("PP2xVPP2", "padded", "bradley_terry")],
)
def test_values_and_scores_are_those_of_transformers(
    ranks, heads, layout: str, batching: str, kind: str
) -> None:
    assert_values_and_scores(ranks, heads, layout, batching, kind, "qwen3_next")
