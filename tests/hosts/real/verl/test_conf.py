"""This package's groups of verl's configuration, composed as verl's trainers compose them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.hosts.roles import check_alike
from megatron_policy.hosts.verl.plugin import SWITCH
from megatron_policy.hosts.verl.translate import translate

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


TRAINED = (
    "override_ddp_config={overlap_grad_reduce: true}",
    "override_transformer_config.recompute_granularity=full",
    "router_replay.mode=R2",
    "optimizer_offload=true",
    "use_distributed_optimizer=false",
)
SHARED = ("tensor_model_parallel_size=2", "seed=7", "param_offload=true")
FURTHER = {"mtp": {"enable": True, "enable_train": True}, "lora": {"rank": 4}}


@pytest.mark.parametrize("engine", ["megatron_policy", "megatron"])
def test_a_reference_that_verl_composes_shares_the_model_of_an_actor_that_trains(
    engine: str,
) -> None:
    section = "engine" if engine == "megatron_policy" else "megatron"
    overrides = [f"++actor_rollout_ref.actor.{section}.{each}" for each in (*TRAINED, *SHARED)]
    workers = composed("ppo_trainer", f"model_engine={engine}", *overrides)["actor_rollout_ref"]
    reference = policy(workers["model"], workers["ref"][section])
    # verl drops both from a reference.
    for key, further in FURTHER.items():
        config = SimpleNamespace(num_nextn_predict_layers=1)
        model = workers["model"] | {"hf_config": config}
        model[key] = model[key] | further
        actor = policy(model, workers["actor"][section], workers["actor"]["optim"])
        assert actor.megatron_cfg.peft.enabled or actor.megatron_cfg.mtp_num_layers
        assert actor.router_replay.enabled and actor.megatron_cfg.activation_checkpointing
        check_alike(actor, reference)


def policy(*sections: Any) -> PolicyConfig:
    return translate(*sections).parse()


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


def imported(asked: str) -> subprocess.CompletedProcess[str]:
    """What a process finds as verl's engine for Megatron on GPUs, with nothing but the switch set:
    by the entry point of the installed package.
    """
    program = (
        "from verl.workers.engine import EngineRegistry;"
        "print(EngineRegistry.get_engine_cls('language_model', 'megatron').__module__)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_USE")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=env | {SWITCH: asked, "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(
    not any(each.name == "megatron_policy" for each in entry_points(group="verl.plugins")),
    reason="megatron-policy is not installed here",
)
def test_the_switch_takes_effect_where_verl_is_imported() -> None:
    taken = imported("megatron")
    assert taken.stdout.strip() == "megatron_policy.hosts.verl.engine", taken.stderr
    assert "megatron_policy" not in imported("").stdout
    misspelt = imported("megatrn")
    assert misspelt.returncode != 0 and "legal: 'megatron'" in misspelt.stderr
