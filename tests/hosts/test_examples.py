"""The configurations of examples/nemo_rl and examples/recipes are what this package runs, whatever
the host's own say; composed here as the host composes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.nemo_rl import prepare
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from tests.unit import host_policies

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(EXAMPLES.glob("recipes/*/nemo_rl.yaml"))
FILES = sorted([*EXAMPLES.glob("nemo_rl/**/*.yaml"), *RECIPES])
REWARDS = {"enabled": True, "reward_model_type": "bradley_terry"}
BASES = {
    "sft.yaml": host_policies.SFT,
    "dpo.yaml": host_policies.DPO,
    "grpo_math_1B.yaml": host_policies.GRPO,
    "ppo_math_1B_megatron.yaml": host_policies.GRPO,
    "vlm_grpo_3B.yaml": host_policies.GRPO
    | {"dynamic_batching": host_policies.GRPO["dynamic_batching"] | {"enabled": True}},
    "rm.yaml": host_policies.DPO | {"reward_model_cfg": REWARDS},
}
OF_MEGATRON = ("ppo_math_1B_megatron.yaml",)
"""The host's files that choose its Megatron worker."""
PARTS = ("dtensor.yaml", "lora.yaml", "tiny.yaml")
"""Files that others inherit, without a policy of their own."""


def composed(file: Path) -> dict[str, Any]:
    """A file over what its `defaults` name; of the host's files `policy` and their one GPU."""
    if not file.is_relative_to(EXAMPLES):
        cluster = {"gpus_per_node": 1, "num_nodes": 1}
        policy = {**BASES[file.name], "dtensor_cfg": {"enabled": file.name not in OF_MEGATRON}}
        policy["megatron_cfg"] = {
            **policy["megatron_cfg"],
            "enabled": file.name in OF_MEGATRON,
        }
        return {"policy": policy, "cluster": cluster}
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    parents = document.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        # The host takes absolute paths as they are, and others from the folder of the first file.
        merged = _over(merged, composed(file.parent / _with_environment(parent)))
    return _over(merged, document)


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _with_environment(text: str) -> str:
    return re.sub(r"\$\{oc\.env:(\w+)\}", lambda found: os.environ[found[1]], text)


def resolved(value: Any, policy: Mapping[str, Any]) -> Any:
    """Interpolations of the environment and of keys of `policy` replaced by what they stand for."""
    if isinstance(value, dict):
        return {key: resolved(item, policy) for key, item in value.items()}
    if isinstance(value, str) and (path := re.fullmatch(r"\$\{policy\.([\w.]+)\}", value)):
        found: Any = policy
        for name in path[1].split("."):
            found = found[name]
        return resolved(found, policy)
    return _with_environment(value) if isinstance(value, str) else value


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL", "/checkout")
    monkeypatch.setenv("TINY", "/tiny")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_the_policy_of_an_example_is_accepted(file: Path, environment: None) -> None:
    document = composed(file)
    if file.name in PARTS:
        assert ("dtensor_cfg" in document["policy"]) == (file.name == "dtensor.yaml")
        return
    policy = resolved(document["policy"], document["policy"])
    config = PolicyConfig.parse(policy)
    assert config.dtensor_cfg.enabled == file.stem.endswith("_dtensor")
    workers = document["cluster"]["gpus_per_node"] * document["cluster"]["num_nodes"]
    assert topology_of(config, workers).world_size == workers
    if file.parent.name == "laptop":
        assert (config.precision, config.model_name) == ("float32", "/tiny/model")
        assert document["cluster"]["gpus_per_node"] == 2


def test_data_for_the_laptop_are_all_sums_once(tmp_path: Path) -> None:
    prepare.write_data(tmp_path, seed=0)
    rows = {}
    for name in ("sums", "pairs"):
        parts = [(tmp_path / f"{part}{name}.jsonl").read_text() for part in ("", "val_")]
        rows[name] = [yaml.safe_load(line) for part in parts for line in part.splitlines()]
    assert len({row["input"] for row in rows["sums"]}) == len(rows["sums"]) == 100
    for one, pair in zip(rows["sums"], rows["pairs"], strict=True):
        first, second = map(int, re.findall(r"\d+", one["input"]))
        assert one["output"] == pair["chosen"] == rf"\boxed{{{first + second}}}"
        assert pair["prompt"] == one["input"] and pair["rejected"] != pair["chosen"]


def test_the_laptops_model_has_seen_what_it_is_asked(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = prepare.write_model(tmp_path / "model", steps=1, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    turns = [{"role": "user", "content": "1 + 2 = "}, {"role": "assistant", "content": "3"}]
    shown = tokenizer.apply_chat_template(turns, tokenize=False)
    assert shown == f"1 + 2 = 3{tokenizer.eos_token}"
    assert shown.startswith(tokenizer.apply_chat_template(turns[:1], tokenize=False))
    longest = max(len(tokenizer(q + a).input_ids) for q, a, _ in prepare.sums())
    assert longest < AutoModelForCausalLM.from_pretrained(path).config.max_position_embeddings
