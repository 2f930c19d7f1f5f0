"""Weights as verl's rollouts take them: adapters after their base, merged ones, and an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.exact import load_hf
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import rollouts
from tests.hosts.real.verl.worker import (
    in_its_own_job,
    made_worker,
    mine,
    text_of,
    trained_steps,
)
from tests.margins import check

RANK, ALPHA = 4, 6.0
LORA = {"model.lora": {"rank": RANK, "alpha": ALPHA, "target_modules": "all-linear"}}


def clones(weights: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in weights}


@in_its_own_job
def adapted(case: Case, model: Path) -> dict[str, Any]:
    """What rollouts are handed before and after two steps, in verl's order: adapters, whose
    iterator is made first, after their base.
    """
    worker = made_worker(case, model)
    engine = worker.engine
    found: dict[str, Any] = {"metrics": trained_steps(worker, range(2))}
    adapters, peft = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    base, again = engine.get_per_tensor_param(layered_summon=False, base_sync_done=False)
    assert peft == again
    found |= {"base": clones(base), "adapters": clones(adapters), "peft": peft}
    merged, none = engine.get_per_tensor_param()
    found |= {"merged": clones(merged), "none": none}
    rows = mine(worker, rollouts(7, "v1", temperature=0.7))
    tu.assign_non_tensor(rows, calculate_entropy=False, compute_loss=False)
    found["trained"] = text_of(engine, worker.infer_batch(rows.clone()), "log_probs").values()
    tu.assign_non_tensor(rows, no_lora_adapter=True)
    found["without"] = text_of(engine, worker.infer_batch(rows), "log_probs").values()
    return found


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2"])
def test_rollouts_get_the_base_once_and_adapters_that_make_it_the_trained_model(
    verl_ranks: Any, qwen2: Path, layout: str
) -> None:
    case = Case(layout=layout, overrides=LORA)
    started = load_hf(qwen2).state_dict()
    for found in verl_ranks.run(case.world, adapted, case, qwen2):
        assert found["none"] is None
        assert {key: found["peft"][key] for key in ("r", "lora_alpha", "bias")} == {
            "r": RANK,
            "lora_alpha": ALPHA,
            "bias": "none",
        }
        assert [str(found["peft"][key].name) for key in ("peft_type", "task_type")] == [
            "LORA",
            "CAUSAL_LM",
        ]
        base, adapters, merged = found["base"], found["adapters"], found["merged"]
        assert base.keys() == merged.keys() <= started.keys()
        assert all(torch.equal(each, started[name].to(each.dtype)) for name, each in base.items())
        changed = [name for name, each in base.items() if not torch.equal(each, merged[name])]
        assert len(changed) == 7 * 4 and len(adapters) == 2 * len(changed)
        for name in changed:
            path = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (adapters[f"{path}.lora_{side}.weight"].double() for side in "AB")
            whole = base[name].double() + ALPHA / RANK * b @ a
            check("verl: merged weights", (whole - merged[name]).abs().max().item(), 1e-6)
        assert not torch.equal(found["trained"], found["without"])


def test_adapters_are_merged_where_verl_asks_for_it(verl_ranks: Any, qwen2: Path) -> None:
    lora = {"model.lora": LORA["model.lora"] | {"merge": True}}
    (found,) = verl_ranks.run(1, merged_alone, Case(overrides=lora), qwen2)
    assert found["peft"] is None and found["names"] == set(load_hf(qwen2).state_dict())


@in_its_own_job
def merged_alone(case: Case, model: Path) -> dict[str, Any]:
    weights, peft = made_worker(case, model).engine.get_per_tensor_param(base_sync_done=True)
    return {"peft": peft, "names": set(dict(weights))}


@in_its_own_job
def sent(case: Case, model: Path) -> bool:
    """verl's other transports iterate over what the engine returns, once."""
    engine = made_worker(case, model).engine
    weights, _ = engine.get_per_tensor_param()
    assert iter(weights) is weights
    names = [name for name, _ in weights]
    assert next(weights, None) is None

    async def through() -> list[str]:
        from verl.workers.rollout.utils import ensure_async_iterator

        again, _ = engine.get_per_tensor_param()
        return [name async for name, _ in ensure_async_iterator(again)]

    return asyncio.run(through()) == names


def test_the_stream_of_weights_is_an_iterator(run: Callable[..., Any]) -> None:
    assert run(sent, Case())
