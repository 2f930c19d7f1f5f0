"""What adapters change of a plan: nothing of the base is trained, and its layers keep no inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.estimate.devices import SHORT
from megatron_policy.estimate.flops import forward_flops
from megatron_policy.estimate.plan import StepPlan, plan_of
from megatron_policy.estimate.states import ModelRows
from tests.unit.command_line import run
from tests.unit.test_estimate_plan import BASE, MODELS, model, shipped

RANK, LENGTH = 16, 4096
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("Llama-3.1-8B", 8, {}),
    "stages, split sequences": ("Llama-3.1-8B", 8, SPLIT | {"pipeline_model_parallel_size": 2}),
    "experts": ("Qwen3-30B-A3B", 16, SPLIT | EXPERTS),
}


@cache
def plan(case: str, adapters: bool, **peft: Any) -> StepPlan:
    """One of `LAYOUTS`, on Megatron-Core's own layers."""
    name, ranks, layout = LAYOUTS[case]
    section = {"enabled": True, "dim": RANK, "alpha": 2 * RANK} | peft
    megatron = {**BASE["megatron_cfg"], **layout, "transformer_impl": "local"}
    if adapters:
        megatron["peft"] = section
    with TemporaryDirectory() as path:
        here = model(Path(path), MODELS[name][0])
        config = PolicyConfig.parse({**BASE, "model_name": str(here), "megatron_cfg": megatron})
        return plan_of(config, ModelRows.of(bind_tables(config)[1]), ranks, SHORT["H100"])


@pytest.mark.parametrize("case", LAYOUTS)
def test_frozen_weights_take_no_state_no_gradients_no_inputs_and_no_products(
    case: str,
) -> None:
    whole, own = plan(case, False), plan(case, True)
    for stage, adapted in zip(whole.stages, own.stages, strict=True):
        assert adapted.states.frozen == pytest.approx(stage.states.parameters, rel=0.01)
        assert adapted.states.gradients < 0.05 * stage.states.gradients
        assert adapted.states.moments < 0.05 * stage.states.moments
        assert 0.5 * stage.activations < adapted.activations < stage.activations
        assert adapted.head <= stage.head
    assert own.stages[-1].head < whole.stages[-1].head
    assert own.reference_bytes == 0
    assert own.staging_bytes < 0.1 * whole.staging_bytes
    # Of each three operations one is left out; attention has all of its own.
    flops = forward_flops(whole.architecture, [LENGTH])
    attention = sum(layer.attention for layer in flops.layers)
    rows = whole.batch_shape.rows
    least = rows * (2 * flops.total + attention)
    assert whole.time.model_flops == rows * 3 * flops.total
    assert 0.99 * least < own.time.model_flops < 1.06 * least
    assert own.time.compute < 0.85 * whole.time.compute
    assert own.time.wire["dp"] < 0.05 * whole.time.wire["dp"] or whole.topology.dp == 1
    assert own.time.optimizer < 0.05 * whole.time.optimizer
    if whole.topology.tp > 1:
        assert own.time.wire["tp"] < whole.time.wire["tp"]
        assert own.time.wire["cp"] == whole.time.wire["cp"]


def test_larger_ranks_and_more_modules_cost_more() -> None:
    some = plan("dense", True, target_modules=("linear_qkv",))
    every, wide = plan("dense", True), plan("dense", True, dim=4 * RANK)
    assert some.time.model_flops < every.time.model_flops < wide.time.model_flops
    first, more, most = (each.stages[0].activations for each in (some, every, wide))
    assert first < more < most
    linears, layers, width = 4, 32, 2
    vectors = linears * layers * width * LENGTH  # bytes of what A gives, for each row of A
    assert most - more == pytest.approx(3 * RANK * vectors, rel=0.01)


def test_a_configuration_with_adapters_is_planned_from_its_file(tmp_path: Path) -> None:
    file = shipped(tmp_path, peft={"enabled": True, "dim": RANK, "alpha": RANK})
    code, said, errors = run("plan", file, "--gpus", "8")
    assert code == 0 and "model FLOPs" in said, errors


def test_a_base_without_adapters_in_its_first_layers_has_no_backward_pass_there() -> None:
    own = plan("dense", True, target_modules=("*.layers.30.*", "*.layers.31.*"))
    every = plan("dense", True)
    rows = own.batch_shape.rows
    arch = own.architecture
    last = forward_flops(replace(arch, layers=arch.layers[:2]), [LENGTH])
    saved = every.time.model_flops - own.time.model_flops
    assert saved > rows * 29 * last.layers[0].total
    assert own.stages[0].activations < 0.15 * every.stages[0].activations
