"""The check of a composed configuration of verl: a line for each role, or what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_policy.hosts.verl.check import main
from tests.hosts.verl.sections import checkpoint as saving
from tests.hosts.verl.sections import engine, model, optim

TP2 = {"tensor_model_parallel_size": 2}
Document = dict[str, Any]


def trained(strategy: str, **role: Any) -> Document:
    section = "engine" if strategy == "megatron_policy" else "megatron"
    return {
        "strategy": strategy,
        section: engine(**TP2),
        "optim": optim(),
        "checkpoint": saving(),
    } | role


def ppo(path: Path, strategy: str = "megatron_policy") -> Document:
    """What verl's PPO trainer prints, as far as it is read: with a reference and a critic."""
    of_model = model(path=str(path), lora_adapter_path=None)
    document = {
        "actor_rollout_ref": {
            "model": of_model,
            "actor": trained(strategy, use_kl_loss=True),
            "ref": trained(strategy),
        },
        "critic": trained(strategy, enable=None, model=of_model),
        "algorithm": {"use_kl_in_reward": False, "adv_estimator": "gae"},
        "trainer": {"nnodes": 2, "n_gpus_per_node": 2},
    }
    return deepcopy(document)


def sft(path: Path) -> Document:
    return {
        "model": model(path=str(path)),
        "engine": engine(**TP2),
        "optim": optim(),
        "checkpoint": saving(),
        "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
    }


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Any], tuple[int, str]]:
    """The exit code for a document, and what is printed."""

    def run(document: Any) -> tuple[int, str]:
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(document))
        capsys.readouterr()
        code = main([str(file)])
        shown = capsys.readouterr()
        assert bool(shown.err) == bool(code)
        return code, shown.out + shown.err

    return run


@pytest.fixture
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2")


@pytest.mark.parametrize("strategy", ["megatron_policy", "megatron"])
def test_each_role_has_a_line_with_its_layout(said, tiny: Path, strategy: str) -> None:
    code, text = said(ppo(tiny, strategy))
    assert code == 0
    layout = f"{tiny} in bfloat16 on 4 ranks, tp=2 x cp=1 x pp=1 x vpp=1 x ep=1 x dp=2"
    assert text.splitlines() == [f"{role}: {layout}" for role in ("actor", "ref", "critic")]


def test_roles_that_verl_does_not_make_have_none(said, tiny: Path) -> None:
    document = ppo(tiny)
    document["algorithm"]["adv_estimator"] = "grpo"
    document["actor_rollout_ref"]["model"]["lora"]["rank"] = 4
    code, text = said(document)
    assert code == 0 and [line[:6] for line in text.splitlines()] == ["actor:"]


def test_supervised_training_is_one_role_whose_ignored_keys_are_named(said, tiny: Path) -> None:
    document = sft(tiny)
    document["engine"]["use_megatron_fsdp"] = True
    code, text = said(document)
    assert code == 0 and text.startswith("model: ")
    assert "\n  engine.use_megatron_fsdp is ignored: parameters are whole" in text


def of_actor(key: str, value: Any) -> Callable[[Document], None]:
    return lambda document: document["actor_rollout_ref"]["actor"]["engine"].update({key: value})


REFUSED: dict[str, tuple[Callable[[Document], Any], str]] = {
    "a key": (of_actor("use_dist_checkpointing", True), "engine.use_dist_checkpointing=True would"),
    "ranks": (lambda document: document["trainer"].update(n_gpus_per_node=1, nnodes=3), "3 ranks"),
    "a size": (of_actor("tensor_model_parallel_size", 3), "ranks do not hold whole replicas"),
    "another reference": (
        lambda document: document["actor_rollout_ref"]["ref"]["engine"].update(dtype="float16"),
        "precision: 'bfloat16' and 'float16'.*policy.precision is engine.dtype",
    ),
    "another critic": (
        lambda document: document["critic"]["engine"].update(tensor_model_parallel_size=1),
        "actor and critic differ in their layouts",
    ),
    "an engine of verl's": (
        lambda document: document["actor_rollout_ref"]["actor"].update(strategy="fsdp"),
        "a strategy is 'fsdp'.*set model_engine to megatron_policy or megatron",
    ),
    "no model": (
        lambda document: document["actor_rollout_ref"]["model"].update(path="/no/such"),
        "/no/such",
    ),
    "a part": (lambda document: document.pop("algorithm"), "is not what verl prints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_error_with_a_code(said, tiny: Path, case: str) -> None:
    change, words = REFUSED[case]
    document = ppo(tiny)
    change(document)
    code, text = said(document)
    _, error, refused = text.rpartition("error: ")
    assert code == 2 and error
    assert re.search(words, refused, re.DOTALL), refused


def test_something_else_than_a_configuration_is_refused(said, capsys: Any) -> None:
    assert said(["a", "list"])[0] == said(None)[0] == main([]) == 2
    assert "usage" in capsys.readouterr().err
