"""What a plan says beside adapters, against what ranks hold, and the operations that they count."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_model
from megatron_policy.converters.architecture import attention
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.flops import model_flops
from megatron_policy.estimate.tower import RowMedia
from tests.dist.cases import open_policy
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, Layout, layout
from tests.dist.test_estimate import (
    ALL,
    PP2,
    VPP2,
    Case,
    assert_plan,
    block,
    evenly_routed,
    full_rows,
    measure,
    recomputed,
)
from tests.losses import SequenceNLL

PEFT = {"enabled": True, "dim": 8, "alpha": 16.0}
PARTS = ["q_proj", "v_proj", "up_proj", "down_proj"]
"""Some parts of fused layers, each with an adapter of its own."""


def adapted(of: Layout, *modules: str, **more: Any) -> Layout:
    """The layout with adapters on these modules, by default on all."""
    return Layout(
        of.world, of.tp, of.megatron | {"peft": PEFT | {"target_modules": modules} | more}
    )


DENSE = {
    name: LAYOUTS[name]
    for name in ("one process", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "TP2xCP2+SP")
} | {"DP2": LAYOUTS["DP2 distributed optimizer, both overlaps"]}
OF_MODULES = {
    "parts": PARTS,
    "attention's": ["linear_qkv", "linear_proj"],
    "output projections'": ["linear_proj"],
    "MLPs'": ["linear_fc1", "linear_fc2"],
    "MLPs' outputs": ["linear_fc2"],
    "last layers'": ["*.layers.2.*", "*.layers.3.*"],
}
RECOMPUTED = {
    "layernorm": recomputed("layernorm"),
    "mlp": recomputed("mlp"),
    "layernorm and mlp": recomputed("layernorm+mlp"),
    "core attention": recomputed("core_attn"),
    "every module": recomputed(ALL),
    "all layers": recomputed(),
    "two layers of four": block(2),
    "PP2xVPP2, layernorm and mlp": recomputed("layernorm+mlp", 2, **VPP2),
    "PP2, all layers": recomputed(world=2, **PP2),
    "TP2+SP, every module": recomputed(ALL, 2, tp=2, sequence_parallel=True),
    "TP2, all layers": recomputed(world=2, tp=2),
}
OF_EXPERTS = {
    "PP2": LAYOUTS["PP2"],
    **{
        name: EXPERT_LAYOUTS[name]
        for name in ("EP2", "EP2xTP2+SP", "TP2+SP, experts whole", "EP2xETP2+TP2")
    },
}
ONE = {"one process": layout(1)}
CASES = {
    **{f"all, {name}": Case("qwen3", adapted(of)) for name, of in DENSE.items()},
    **{
        f"{name}, {where}": Case("qwen3", adapted(LAYOUTS[where], *modules))
        for name, modules in OF_MODULES.items()
        for where in ("one process", "TP2+SP")
    },
    **{
        f"{name}, {which}": Case("qwen3", adapted(of, *modules), 128, 4)
        for name, of in RECOMPUTED.items()
        for which, modules in (("all", ()), ("some", ("linear_qkv", "linear_fc2")))
    },
    **{
        f"experts, {family}, {name}": Case(family, adapted(of), *size)
        for layouts, size in ((ONE | OF_EXPERTS, ()), (RECOMPUTED, (128, 4)))
        for name, of in layouts.items()
        for family in ("qwen3_moe", "deepseek_v3")
        if (family == "qwen3_moe" and name != "TP2, all layers") or of.world == 1 or not size
    },
    "experts' alone": Case("qwen3_moe", adapted(layout(1), "*.experts.*")),
    "parts of experts": Case("qwen3_moe", adapted(layout(1), "up_proj", "down_proj")),
    "compressed": Case("deepseek_v3", adapted(layout(1), "linear_kv_up_proj", "linear_fc1")),
    "parallel, attention's": Case("cohere", adapted(layout(1), "linear_qkv"), 128, 4),
    "parallel, MLPs'": Case("cohere", adapted(layout(1), "linear_fc2"), 128, 4),
    "delta nets": Case("qwen3_next", adapted(layout(1)), 128, 4),
    "delta nets, TP2+SP": Case("qwen3_next", adapted(LAYOUTS["TP2+SP"]), 128, 4),
    "delta nets, outputs": Case("qwen3_next", adapted(layout(1), "out_proj"), 128, 4),
    "Mamba2": Case("nemotron_h", adapted(layout(1)), 128, 4),
    "Mamba2, inputs": Case("nemotron_h", adapted(layout(1), "in_proj"), 128, 4),
    "long, packed": Case(
        "qwen3", adapted(layout(1)), 640, 2, together=2, packed=True, sizes={"max_position": 2048}
    ),
    **{
        f"{name}, {family}": Case(family, adapted(of), 128, 4)
        for family in ("cohere", "gemma2", "gpt_oss", "apertus", "olmo3", "mistral")
        for name, of in (ONE | {"every module": RECOMPUTED["every module"]}).items()
    },
    "norms over heads of all ranks": Case("olmo3", adapted(LAYOUTS["TP2+SP"]), 128, 4),
    **{
        f"towers, {name}": Case(family, adapted(of, *modules), 96, 4, media=media)
        for name, family, of, modules, media in (
            ("alone", "qwen3_vl", layout(1), ("qkv", "merger.linear_fc1"), RowMedia(256)),
            ("TP2+SP", "qwen3_vl", LAYOUTS["TP2+SP"], ("attn.proj", "q_proj"), RowMedia(256)),
            ("PP2", "qwen2_5_vl", LAYOUTS["PP2"], ("qkv", "o_proj"), RowMedia(256)),
            ("hearing", "qwen2_5_omni_thinker", layout(1), ("fc2",), RowMedia(frames=300)),
        )
    },
    **{
        f"dropout, {position}, {name}": Case("qwen3", adapted(of, **dropped))
        for position in ("pre", "post")
        for dropped in ({"dropout": 0.1, "dropout_position": position},)
        for name, of in (ONE | {"TP2+SP": LAYOUTS["TP2+SP"]}).items()
    },
}


@pytest.mark.parametrize("case", CASES)
def test_plan_says_what_ranks_hold_beside_adapters(ranks, checkpoint, case: str) -> None:
    of = CASES[case]
    raw = of.config(checkpoint(of.family, **of.sizes))
    found = ranks.run(of.layout.world, measure, raw, of.rows, of.length, of.media)
    assert_plan(PolicyConfig.parse(raw), of, found)


def operations(config: dict[str, Any], rows: int, length: int) -> tuple[int, float]:
    """Of a step over `rows` rows: what torch counts, but for attention's kernels, and what the
    step's result says.
    """
    with open_policy(config) as policy, FlopCounterMode(display=False) as counter:
        data = full_rows(rows, length)
        arch = policy._engine.table.architecture
        if arch.moe is not None:
            data["routed_experts"] = evenly_routed(rows, length, arch)
        told = policy.train(data, SequenceNLL())["speed"]["model_flops"]
        return counter.get_total_flops(), told


OPERATIONS = {
    "fused": Case("qwen3", adapted(layout(1))),
    "experts": Case("qwen3_moe", adapted(layout(1))),
    "experts, compressed": Case("deepseek_v3", adapted(layout(1), dim=2)),
    "last layers'": Case("qwen3_moe", adapted(layout(1), "*.layers.2.*", "*.layers.3.*")),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_plan_counts_the_operations_that_torch_counts(
    ranks, checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    of = OPERATIONS[name]
    raw = of.config(checkpoint(of.family))
    ((counted, told),) = ranks.run(1, operations, raw, of.rows, of.length)
    config = PolicyConfig.parse(raw)
    table = bind_model(config)
    lengths, predicted = [of.length] * of.rows, of.rows * (of.length - 1)
    adapters = ModelAdapters.of_model(config, table)
    assert told == model_flops(table.architecture, lengths, predicted, adapters)
    monkeypatch.setattr(attention, "count_visible_pairs", lambda *_: 0)
    without_attention = model_flops(table.architecture, lengths, predicted, adapters)
    assert without_attention == pytest.approx(counted, rel=0.02)
    whole = model_flops(table.architecture, lengths, predicted)
    assert without_attention < 0.9 * whole
