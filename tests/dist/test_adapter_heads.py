"""Adapters beside a scalar head that is trained in full: as PEFT trains transformers'
classification models, under every layout and batching; what is handed over, saved and resumed.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint import manifest, tracker
from tests import oracle, peft_models, scalar_oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.dist.resuming import paths, resumed
from tests.dist.test_adapter_handover import ANEW, fresh_adapters, refused
from tests.dist.test_adapters import ALL, adapted
from tests.dist.test_scalar_heads import BATCHINGS, expected_of, heads
from tests.dist.test_scalar_training import TRAINED, data, score_level, steps_of, value_level
from tests.exact import Exact, assert_equal

__all__ = ["heads"]

ATTENTION = ALL[:4]


def config_of(
    path: Path, kind: str, megatron: dict[str, Any], adapters: Path | None, **more: Any
) -> dict[str, Any]:
    """A policy with adapters, from that directory or anew, and that head."""
    peft = {"target_modules": ALL, **more.pop("peft", {})}
    head = {"enabled": True, "reward_model_type": kind}
    return adapted(path, megatron, adapters, **peft) | {"reward_model_cfg": head} | more


def level(kind: str, model: Any, batch: BatchedDataDict) -> torch.Tensor:
    of = value_level if kind == "regression" else score_level
    return of(model.get_base_model(), batch)


def values(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    return scalar_oracle.values(model.get_base_model(), rows)


@cache
def learned(path: Path, kind: str, adapters: Path) -> oracle.Learned:
    """What PEFT and torch's AdamW make of two global batches."""
    load, own = peft_models.LoadsWithHead(kind, adapters), peft_models.is_adapter
    return oracle.Learned.of(path, data(), GLOBAL_BATCH, partial(level, kind), load=load, own=own)


@pytest.fixture(scope="module")
def started(heads, tmp_path_factory: pytest.TempPathFactory):
    """`started(family, kind)`: a checkpoint, adapters on it with another head, and their modules;
    made once.
    """

    @cache
    def made(family: str, kind: str) -> tuple[Path, Path, list[str]]:
        path, target = heads(family, kind), tmp_path_factory.mktemp("adapters") / "start"
        modules = ATTENTION if family == "qwen3_moe" else ALL
        return path, peft_models.make_head_adapters(kind, path, target, modules), modules

    return made


def seen_of(policy: Any, steps: list[Any]) -> dict[str, Any]:
    with policy.reference():
        base = policy.values(data())
    return {
        "steps": steps,
        "base": base,
        "adapters": {n: t.clone() for n, t in policy.export(adapters=True)},
        "values": policy.values(data()),
        "named": [name for name, _ in policy.named_parameters()],
    }


def train(config: dict[str, Any], name: str, batching: str) -> dict[str, Any]:
    """Two steps, and what the base gives before and after them."""
    with open_policy(config, init_reference_model=False) as policy:
        with policy.reference():
            before = policy.values(data())
        loss = TRAINED[name][1]()
        steps = [policy.train(batch, loss, mbs=1) for batch in steps_of(policy, batching)]
        return seen_of(policy, steps) | {"before": before}


CASES = [
    ("one process", "padded", "values", "qwen2"),
    ("one process", "packed", "scores", "qwen3"),
    ("TP2+SP", "padded", "scores", "qwen2"),
    ("TP2", "dynamic", "values", "qwen3"),
    ("PP2 uneven", "packed", "scores", "qwen2"),
    ("PP2xVPP2", "dynamic", "values", "qwen3"),
    ("DP2 distributed optimizer, both overlaps", "packed", "values", "qwen2"),
    ("TP2xCP2+SP", "padded", "scores", "qwen2"),
    ("TP2xCP2+SP", "packed", "values", "qwen3"),
    ("TP2xPP2xDP2+SP", "padded", "values", "qwen2"),
    ("TP4 over 2 groups", "packed", "values", "qwen3"),
    ("EP2", "packed", "values", "qwen3_moe"),
    ("EP2xTP2+SP", "padded", "scores", "qwen3_moe"),
]


@pytest.mark.parametrize(("layout", "batching", "name", "family"), CASES)
def test_adapters_and_the_head_are_trained_like_pefts_by_torchs_optimizer(
    ranks, started, layout: str, batching: str, name: str, family: str
) -> None:
    kind, case = TRAINED[name][0], (LAYOUTS | EXPERT_LAYOUTS)[layout]
    path, adapters, modules = started(family, kind)
    top = BATCHINGS[batching] | {"peft": {"target_modules": modules}}
    config = config_of(path, kind, case.megatron, adapters, **top)
    hf = learned(path, kind, adapters)
    base = expected_of(path, kind, data(), scalar_oracle.values)
    for seen in ranks.run(case.world, train, config, name, batching):
        assert_trained(seen, hf)
        assert torch.equal(seen["before"], seen["base"])
        assert_equal("values of the base", seen["base"], base)


def assert_trained(seen: dict[str, Any], hf: oracle.Learned) -> None:
    hf.assert_same_steps(seen["steps"])
    trained = {
        peft_models.saved_name(name): weight
        for name, weight in hf.exact.weights.items()
        if peft_models.is_adapter(name) is not None
    }
    assert "base_model.model.score.weight" in trained and trained.keys() == seen["adapters"].keys()
    for weight, exact in trained.items():
        hf.assert_same_weight(seen["adapters"][weight], exact, weight)
    assert_equal("values after training", seen["values"], hf.read(partial(values, rows=data())))
    assert len(set(seen["named"])) == len(seen["named"])


def begin(config: dict[str, Any], name: str, root: Path) -> list[Any]:
    """The first step and a checkpoint of it."""
    loss = TRAINED[name][1]()
    with open_policy(config) as policy:
        steps = [policy.train(steps_of(policy, "padded")[0], loss, mbs=1)]
        policy.save_checkpoint(**paths(root / "saved"))
    return steps


def go_on(config: dict[str, Any], name: str, root: Path, steps: list[Any]) -> dict[str, Any]:
    """The second step after the checkpoint of the first; then everything is handed over."""
    loss = TRAINED[name][1]()
    with resumed(config, root / "saved") as policy:
        taken = [*steps, policy.train(steps_of(policy, "padded")[1], loss, mbs=1)]
        policy.export_peft(root / "peft")
        policy.export_hf(root / "merged")
        return seen_of(policy, taken)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "other", "name"),
    [
        ("TP2+SP", "PP2", "values"),
        ("PP2xVPP2", "TP2", "scores"),
        ("one process", "TP2xCP2+SP", "values"),
        ("DP2 distributed optimizer, both overlaps", "one process", "scores"),
    ],
)
def test_they_go_on_from_a_checkpoint_in_another_layout_and_are_handed_over(
    ranks, started, tmp_path: Path, layout: str, other: str, name: str
) -> None:
    kind = TRAINED[name][0]
    path, adapters, _ = started("qwen2", kind)
    here, there = (
        config_of(path, kind, LAYOUTS[each].megatron, adapters) for each in (layout, other)
    )
    steps = ranks.run(LAYOUTS[layout].world, begin, here, name, tmp_path)[0]
    for folder in paths(tmp_path / "saved").values():
        keys = manifest.read(tracker.find(folder)).tensors.keys()
        assert keys and all(".adapter." in key or "output_layer." in key for key in keys)
    hf = learned(path, kind, adapters)
    for seen in ranks.run(LAYOUTS[other].world, go_on, there, name, tmp_path, steps):
        assert_trained(seen, hf)
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    task = "TOKEN_CLS" if kind == "regression" else "SEQ_CLS"
    assert (said["task_type"], said["modules_to_save"]) == (task, ["score"])
    after = hf.read(partial(values, rows=data()))
    with torch.no_grad():
        merged = scalar_oracle.load(kind, tmp_path / "merged")
        assert_equal("values of the merged export", scalar_oracle.values(merged, data()), after)
        loaded = peft_models.LoadsWithHead(kind, tmp_path / "peft")(path)
        assert_equal("values of peft", values(loaded, data()), after)
        if kind == "bradley_terry":
            last = data()["input_lengths"].unsqueeze(1) - 1
            scores = Exact(after.value.gather(1, last).squeeze(1), after.rounding)
            assert_equal("scores of peft", scalar_oracle.scores(loaded, data()), scores)


@pytest.mark.nightly
def test_a_fresh_head_joins_adapters_of_a_language_model_alike_in_every_layout(
    ranks, checkpoints, tmp_path: Path
) -> None:
    path = checkpoints[True]
    (alone,) = ranks.run(1, fresh_adapters, config_of(path, "regression", {}, None, peft=ANEW))
    config = config_of(path, "regression", LAYOUTS["TP2+SP"].megatron, None, peft=ANEW)
    for seen in ranks.run(2, fresh_adapters, config):
        assert seen.keys() == alone.keys()
        assert all(torch.equal(seen[name], tensor) for name, tensor in alone.items())
    language = peft_models.make_adapters(path, tmp_path / "language", ALL)
    (started,) = ranks.run(1, fresh_adapters, config_of(path, "regression", {}, language))
    given = peft_models.load_file(language / "adapter_model.safetensors")
    assert given.keys() < started.keys()
    for name, tensor in started.items():
        assert torch.equal(tensor, given.get(name, alone[name])), name


def save(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        policy.save_checkpoint(root)


def test_adapters_of_another_head_are_refused(ranks, checkpoints, heads, tmp_path: Path) -> None:
    path = checkpoints[True]
    language, other = adapted(path, {}, None, target_modules=ALL), tmp_path / "language"
    scalar = config_of(path, "regression", {}, None)
    ranks.run(1, save, language, other)
    (said,) = ranks.run(1, refused, scalar, other)
    assert "reward_model_cfg differ" in said
    start = peft_models.make_head_adapters(
        "bradley_terry", heads("qwen2", "bradley_terry"), tmp_path / "start", ALL
    )
    with pytest.raises(AssertionError, match=r"this policy has none: set .* or merge them"):
        ranks.run(1, fresh_adapters, adapted(path, {}, start, target_modules=ALL))
    with pytest.raises(AssertionError, match=r"score\.bias"):
        of_tokens = config_of(heads("qwen2", "bradley_terry"), "regression", {}, start)
        ranks.run(1, fresh_adapters, of_tokens)
