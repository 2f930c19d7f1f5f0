"""This package's groups of verl's configuration, composed as verl's trainers compose them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

SEARCHED = "hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]"
VERLS = "verl.trainer.config"
OURS = "megatron_policy.hosts.verl.config.MegatronPolicyEngineConfig"


def composed(trainer: str, *overrides: str) -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with warnings.catch_warnings(), initialize_config_module(VERLS, version_base=None):
        warnings.filterwarnings("error", message=".*is not available")
        document = compose(trainer, overrides=[SEARCHED, *overrides])
    keys = [key for key in ("actor_rollout_ref", "critic", "engine", "optim") if key in document]
    return {key: OmegaConf.to_container(document[key], resolve=True) for key in keys}


def test_one_override_chooses_the_engine_for_every_role() -> None:
    document = composed("ppo_trainer", "model_engine=megatron_policy")
    workers = document["actor_rollout_ref"]
    for role in (workers["actor"], workers["ref"], document["critic"]):
        assert role["strategy"] == role["engine"]["strategy"] == "megatron_policy"
        assert role["engine"]["_target_"] == OURS
    assert [workers[role]["engine"]["forward_only"] for role in ("actor", "ref")] == [False, True]


@pytest.mark.parametrize(
    "key, value",
    [
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("virtual_pipeline_model_parallel_size", 2),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 2),
        ("expert_tensor_parallel_size", 1),
        ("sequence_parallel", False),
        ("seed", 7),
    ],
)
def test_the_reference_and_the_critic_follow_the_actor(key: str, value: Any) -> None:
    given = f"actor_rollout_ref.actor.engine.{key}={value}"
    document = composed("ppo_trainer", "model_engine=megatron_policy", given)
    workers = document["actor_rollout_ref"]
    engines = [workers["actor"], workers["ref"], document["critic"]]
    assert [role["engine"][key] for role in engines] == [value] * 3


def test_a_critic_beside_an_actor_of_another_engine_has_verls_defaults() -> None:
    document = composed("ppo_trainer", "critic=megatron_policy_critic")
    plain = composed("sft_trainer_engine", "engine=megatron_policy", "optim=megatron")["engine"]
    assert document["critic"]["engine"] == plain


def test_supervised_training_takes_the_engine_and_a_policys_own_keys() -> None:
    own = "+engine.policy.megatron_cfg.moe_per_layer_logging=true"
    document = composed("sft_trainer_engine", "engine=megatron_policy", "optim=megatron", own)
    assert document["engine"]["_target_"] == OURS
    assert document["engine"]["policy"] == {"megatron_cfg": {"moe_per_layer_logging": True}}
    assert document["optim"]["_target_"].endswith("McoreOptimizerConfig")
