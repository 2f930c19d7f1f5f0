"""Low-rank adapters in every layout, as PEFT adapts transformers' model and torch's AdamW trains
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import margins, oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, SIZES, VOCAB
from tests.dist.test_export import tensors_of
from tests.exact import Exact, assert_equal
from tests.invariance import page
from tests.invariance.further import (
    ADAPTERS,
    FUSED,
    OF_EXPERTS,
    OF_MODULES,
    OF_STACKS,
    PADDED,
    Collected,
    FurtherCell,
)
from tests.invariance.further import LATENT as LATENT_ATTENTION
from tests.invariance.further import PACKED as PACKED_ROWS

STEPS = 2
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "up_proj"]
CONVOLUTIONS = ["in_proj", "out_proj", "q_proj", "v_proj", "w1", "w2"]
DELTA_NETS = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"]
DELTA_NETS_APART = [f"in_proj_{each}" for each in ("qkv", "z", "b", "a")] + ["out_proj", "q_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
FULL = {
    "activation_checkpointing": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
MLP_OF_LAST = [f"{layer}.mlp.{each}" for layer in (2, 3) for each in ALL[4:]]
LAST = [f"model.layers.{layer}.mlp.*" for layer in (2, 3)]
"""Modules of the second of two stages: the first trains nothing."""


def adapted(path: Path, megatron: dict[str, Any], adapters: Path | None, **peft: Any) -> Any:
    """A policy's configuration with adapters, from that directory or anew."""
    section = {"enabled": True, "dim": peft_models.RANK, "alpha": peft_models.ALPHA} | peft
    if adapters is not None:
        section["start_from"] = str(adapters)
    return policy_config(path, {**megatron, "peft": section})


@dataclass(frozen=True)
class Kind:
    """Adapters of one kind, by the modules that the policy adapts; how PEFT makes and loads the
    same, or plain torch where PEFT has no such modules.
    """

    family: str
    modules: list[str]
    make: Callable[[Path, Path], Path]
    load: Callable[[Path], Any] = peft_models.Loads
    own: Callable[[str], Any] = peft_models.is_adapter
    saved: Callable[[str], str] = peft_models.saved_name


def of_peft(family: str, modules: list[str], theirs: list[str] | None = None, **how: Any) -> Kind:
    return Kind(
        family, modules, partial(peft_models.make_adapters, modules=theirs or modules, **how)
    )


def of_stacks(*stacks: str) -> Kind:
    """PEFT adapts the parameters themselves (`target_parameters`)."""
    modules = ["q_proj", "o_proj"]
    parameters = [f"experts.{each}" for each in stacks]
    return of_peft("gpt_oss", [*modules, *stacks], modules, stacks=parameters)


KINDS = {
    OF_MODULES: of_peft("qwen2", ALL),
    "of some modules": of_peft("qwen2", SOME),
    FUSED: replace(
        of_peft("qwen2", [], ALL, shared=True), load=partial(peft_models.Loads, shared=True)
    ),
    "of one stage": of_peft("qwen2", LAST, MLP_OF_LAST),
    OF_EXPERTS: Kind(
        "qwen3_moe",
        ["model.layers.*.mlp.experts.*"],
        peft_models.make_expert_adapters,
        peft_models.LoadsExperts,
        peft_models.is_expert_adapter,
        peft_models.saved_expert_name,
    ),
    LATENT_ATTENTION: of_peft("deepseek_v3", LATENT),
    "of convolutions": of_peft("lfm2", CONVOLUTIONS),
    "of delta nets": of_peft("qwen3_next", DELTA_NETS),
    "of delta nets, section by section": of_peft("qwen3_5_text", DELTA_NETS_APART),
    OF_STACKS: of_stacks("gate_up_proj", "down_proj"),
    "of outputs' stacks": of_stacks("down_proj"),
    "of inputs' stacks": of_stacks("gate_up_proj"),
}
OVERLAPS = "DP2 distributed optimizer, both overlaps"
DAILY = [(kind, "one process") for kind in (OF_MODULES, OF_EXPERTS, LATENT_ATTENTION, OF_STACKS)]
DAILY += [("of delta nets", "TP2+SP")]
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    *((OF_MODULES, name, PADDED, {}) for name in LAYOUTS),
    *((FUSED, name, PADDED, {}) for name in LAYOUTS),
    *(
        ("of some modules", name, PADDED, {})
        for name in ("one process", "TP2+SP", "PP2xVPP2", "TP2xPP2xDP2+SP", "TP2xCP2+SP")
    ),
    ("of one stage", "PP2", PADDED, FULL),
    ("of one stage", "PP2", PADDED, {}),
    ("of one stage", "PP2", PADDED, OVERLAPPED),
    *((OF_MODULES, name, PADDED, FULL) for name in ("one process", "PP2")),
    *((OF_MODULES, name, PACKED_ROWS, {}) for name in ("TP2xCP2+SP", OVERLAPS)),
    (OF_EXPERTS, "one process", PADDED, {}),
    *(
        (OF_EXPERTS, name, PADDED, {})
        for name in EXPERT_LAYOUTS
        if "CP2" not in name or "EP2xCP2" in name
    ),
    (OF_EXPERTS, "EP2", PACKED_ROWS, {}),
    *((LATENT_ATTENTION, name, PADDED, {}) for name in ("one process", "TP2+SP", "EP2xTP2+SP")),
    *(
        (f"of {each}", name, batching, FULL)
        for each in ("convolutions", "delta nets", "delta nets, section by section")
        for name, batching in (
            ("TP2+SP", PADDED),
            ("PP2xVPP2", PADDED),
            ("TP2xCP2+SP", PACKED_ROWS),
        )
    ),
    *(
        (OF_STACKS, name, PADDED, {})
        for name in ("one process", "EP2", "EP2xTP2+SP", "EP2xCP2", "TP2+SP, experts whole")
    ),
    (OF_STACKS, "EP4xDP2, distributed optimizer, overlaps", PADDED, {}),
    ("of outputs' stacks", "EP2xPP2", PADDED, {}),
    ("of inputs' stacks", "EP4", PADDED, {}),
]


def train(config: dict[str, Any], data: BatchedDataDict, mbs: int | None = 1) -> dict[str, Any]:
    """What this rank sees of two steps: before, between and after them."""
    names = ["input_ids"] if mbs else ["input_ids", "input_lengths"]
    read = BatchedDataDict({name: data[name] for name in names})
    with open_policy(config, init_reference_model=False) as policy:
        base = policy.reference_logprobs(read)
        steps = [
            policy.train(batch, LOSSES["token"](), mbs=mbs) for batch in own_steps(policy, data)
        ]
        return {
            "base": base,
            "steps": steps,
            "reference": policy.reference_logprobs(read),
            "logprobs": policy.logprobs(read),
            "adapters": {n: t.clone() for n, t in policy.export(adapters=True)},
            "names": {name for name, _ in policy.export()},
        }


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(ADAPTERS)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


@pytest.mark.parametrize(
    ("kind", "layout", "batching", "megatron"),
    [pytest.param(*case, marks=[pytest.mark.daily] * (case[:2] in DAILY)) for case in CASES],
)
def test_adapters_are_trained_like_pefts_by_torchs_optimizer(
    ranks,
    checkpoint,
    measured: Collected,
    tmp_path: Path,
    kind: str,
    layout: str,
    batching: str,
    megatron: dict[str, Any],
) -> None:
    of, case, packed = KINDS[kind], (LAYOUTS | EXPERT_LAYOUTS)[layout], batching == PACKED_ROWS
    path = checkpoint(of.family, tied=False, **SIZES)
    start = of.make(path, tmp_path / "start")
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    hf = oracle.Learned.of(
        path, data, GLOBAL_BATCH, oracle.token_level, own=of.own, load=of.load(start)
    )
    trained = {of.saved(n): w for n, w in hf.exact.weights.items() if of.own(n) is not None}
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    expected, of_base = hf.read(read), Exact.of(path, read)
    config = adapted(path, case.megatron | megatron, start, target_modules=of.modules)
    results = ranks.run(
        case.world, train, config | PACKED if packed else config, data, None if packed else 1
    )
    with margins.recorded() as record:
        for seen in results:
            hf.assert_same_steps(seen["steps"])
            assert torch.equal(seen["base"], seen["reference"])
            assert trained and trained.keys() <= seen["adapters"].keys()
            for weight, exact in trained.items():
                hf.assert_same_weight(seen["adapters"][weight], exact, weight)
            assert seen["names"] == tensors_of(path).keys()
            if not packed:  # where padding is not read
                assert_equal("logprobs after training", seen["logprobs"][:, 1:], expected)
                assert_equal("logprobs of the base", seen["base"][:, 1:], of_base)
    if not megatron:
        measured.add(FurtherCell(layout, batching, kind, of.family), record)
