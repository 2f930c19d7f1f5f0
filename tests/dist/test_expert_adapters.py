"""Adapters of every family with experts, on each kind of module: what is exported PEFT computes,
over transformers' own class, as the policy does, and so does a policy what PEFT made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.adapters.stacks import has_gates, is_read_apart
from megatron_policy.adapters.table import is_adaptable, is_stacked, name_module
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError
from tests import oracle, peft_models
from tests.dist.cases import open_policy
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.test_adapters import adapted
from tests.exact import assert_equal
from tests.families import EXPERTS

TOKENS = oracle.make_batch(4, LENGTH, VOCAB)["input_ids"]
KINDS: dict[str, list[str]] = {
    "all": [],
    "inputs": ["linear_fc1"],
    "outputs": ["linear_fc2"],
    "experts": ["*.experts.*"],
}
OF_MAMBA2 = {"nemotron_h": ["mixer.out_proj"], "granitemoehybrid": ["mamba.out_proj"]}
"""Modules that PEFT refuses."""
SPLIT = "EP2xTP2+SP"
DAILY = [("qwen2_moe", "one process"), ("nemotron_h", "one process")]
CASES = [
    *((family, "one process") for family in EXPERTS),
    *((family, SPLIT) for family in ("qwen3_moe", "nemotron_h", "granitemoe", "qwen3_5_moe")),
]
EVERY = [pytest.param(*case, marks=[pytest.mark.daily] * (case in DAILY)) for case in CASES]


def list_parts(table: Table) -> Iterator[str]:
    """The last words of the paths of modules, where each part of a layer can have an adapter."""
    for entry in filter(is_adaptable, table.entries):
        if len(entry.hf) == 1 or is_read_apart(table) or entry.expert is None:
            yield from (name_module(name, table).rpartition(".")[2] for name in entry.hf)


def export_each(configs: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    """Log-probabilities by each configuration; its adapters are then in a directory of that name,
    of which another policy makes the same.
    """
    return {kind: export(config, root / kind) for kind, config in configs.items()}


def export(config: dict[str, Any], path: Path) -> torch.Tensor:
    with open_policy(config, init_reference_model=False) as policy:
        policy.export_peft(path)
    peft = config["megatron_cfg"]["peft"]
    read = {**config["megatron_cfg"], "peft": {**peft, "start_from": str(path)}}
    first = read_logprobs(config)
    assert torch.equal(first, read_logprobs({**config, "megatron_cfg": read, "seed": 7}))
    return first


def read_logprobs(config: dict[str, Any]) -> torch.Tensor:
    with open_policy(config, init_reference_model=False) as policy:
        return policy.logprobs(BatchedDataDict({"input_ids": TOKENS}))


@pytest.mark.parametrize(("family", "layout"), EVERY)
def test_peft_computes_what_is_exported_as_the_policy_does(
    ranks, checkpoint, tmp_path: Path, family: str, layout: str
) -> None:
    path, case = checkpoint(family, **SIZES), (LAYOUTS | EXPERT_LAYOUTS)[layout]
    table = open_model(path).table
    kinds = KINDS | {"apart": sorted(set(list_parts(table)))}
    if not is_read_apart(table) and has_gates(table):
        kinds["apart"] = [name for name in kinds["apart"] if name not in ("gate_proj", "up_proj")]
    configs = {}
    for kind, modules in kinds.items():
        excluded = OF_MAMBA2.get(family, []) if kind in ("all", "apart") else []
        drawn = {"exclude_modules": excluded, "lora_B_init_method": "normal", "dim": 2}
        configs[kind] = adapted(path, case.megatron, None, target_modules=modules, **drawn)
    for seen in ranks.run(case.world, export_each, configs, tmp_path):
        for kind, logprobs in seen.items():
            exact = peft_models.logprobs(path, tmp_path / kind, TOKENS)
            assert_equal(f"logprobs of peft, {kind}", logprobs[:, 1:], exact)


@pytest.mark.parametrize(("family", "layout"), EVERY)
def test_a_policy_computes_what_peft_made_as_peft_does(
    ranks, checkpoint, tmp_path: Path, family: str, layout: str
) -> None:
    """Whose adapters of gate and up projections of experts share an A."""
    path, case = checkpoint(family, **SIZES), (LAYOUTS | EXPERT_LAYOUTS)[layout]
    into = "gate_up_proj" if has_gates(open_model(path).table) else "up_proj"
    for number, leaves in enumerate(([into, "down_proj"], [into], ["down_proj"])):
        stacks = [f"experts.{leaf}" for leaf in leaves]
        made = peft_models.make_adapters(path, tmp_path / str(number), [], stacks=stacks)
        layers = {into: "linear_fc1", "down_proj": "linear_fc2"}
        modules = [f"*.local_experts.*.{layers[leaf]}" for leaf in leaves]
        config = adapted(path, case.megatron, made, target_modules=modules)
        exact = peft_models.logprobs(path, made, TOKENS)
        for logprobs in ranks.run(case.world, read_logprobs, config):
            assert_equal(f"logprobs of a policy, {leaves}", logprobs[:, 1:], exact)


def test_ranks_that_peft_has_added_up_are_read(ranks, checkpoint, tmp_path: Path) -> None:
    """Of gate and up projections, which it was told to adapt by the names that files have."""
    path = checkpoint("olmoe", **SIZES)
    made = peft_models.make_adapters(path, tmp_path / "made", ["gate_proj", "up_proj"])
    twice = {"dim": 2 * peft_models.RANK, "alpha": 2 * peft_models.ALPHA}
    config = adapted(path, {}, made, target_modules=["linear_fc1"], **twice)
    exact = peft_models.logprobs(path, made, TOKENS)
    (logprobs,) = ranks.run(1, read_logprobs, config)
    assert_equal("logprobs of a policy", logprobs[:, 1:], exact)
    mixed = peft_models.make_adapters(path, tmp_path / "mixed", ["gate_proj", "up_proj", "o_proj"])
    config = adapted(path, {}, mixed, target_modules=["linear_fc1", "o_proj"])
    with pytest.raises(AssertionError, match=r"gate_up_proj, but a policy's are all alike"):
        ranks.run(1, read_logprobs, config)


def refuse(configs: list[dict[str, Any]], path: Path) -> list[str]:
    said = []
    for config in configs:
        with open_policy(config, init_reference_model=False) as policy:
            assert list(policy.export(adapters=True))
            with pytest.raises(ConfigError) as error:
                policy.export_peft(path)
        said.append(str(error.value))
    assert not path.exists()
    return said


def test_adapters_that_peft_cannot_stack_are_not_exported(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen3_moe", **SIZES)
    assert not any(is_stacked(entry) for entry in open_model(path).table.entries)
    alone = adapted(path, {}, None, target_modules=["up_proj"])
    some = adapted(path, {}, None, target_modules=["*.local_experts.1.*"])
    apart = adapted(path, {}, None, target_modules=["gate_proj", "up_proj"])
    (heard,) = ranks.run(1, refuse, [alone, some], tmp_path / "peft")
    for said, counts in zip(heard, ("4 of the 8", "1 of the 4"), strict=True):
        assert f"adapters on {counts} projections that model.layers." in said
        assert "of a qwen3_moe model" in said and "take the merged model" in said
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    made = peft_models.make_adapters(path, tmp_path / "made", [], stacks=stacks)
    apart["megatron_cfg"]["peft"]["start_from"] = str(made)
    with pytest.raises(AssertionError, match=r"have one A .* name linear_fc1 in policy\.megatron"):
        ranks.run(1, read_logprobs, apart)
