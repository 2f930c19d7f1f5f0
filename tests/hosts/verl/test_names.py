"""Errors of a policy's configuration say where verl's has the keys that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_policy.config.layout import topology_of
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.hosts.verl.sections import name_in_verl, with_verl_names
from megatron_policy.hosts.verl.translate import translate
from tests.hosts.verl.sections import engine, model, optim, sections_with

CHANGED = {
    "model.path": "/models/other",
    "model.model_type": "value_model",
    "model.override_config.rope_theta": 1e6,
    "model.lora.rank": 16,
    "model.lora.alpha": 64,
    "model.lora.adapter_path": "/adapters",
    "model.lora.dtype": "bf16",
    "model.mtp.detach_encoder": True,
    "model.mtp.mtp_loss_scaling_factor": 0.5,
    "engine.dtype": "float32",
    "engine.seed": 7,
    "engine.use_remove_padding": False,
    "engine.router_replay.mode": "R2",
    "engine.tensor_model_parallel_size": 2,
    "engine.virtual_pipeline_model_parallel_size": 2,
    "engine.use_distributed_optimizer": False,
    "engine.override_transformer_config.moe_router_dtype": "fp64",
    "engine.override_ddp_config.overlap_grad_reduce": True,
    "engine.policy.make_sequence_length_divisible_by": 8,
    "optim.lr": 1e-5,
    "optim.betas": [0.8, 0.9],
    "optim.optimizer": "sgd",
    "optim.clip_grad": 0.5,
    "optim.weight_decay": 0.1,
    "optim.lr_decay_style": "cosine",
    "optim.lr_decay_steps": 50,
    "optim.lr_warmup_steps": 7,
    "optim.override_optimizer_config.adam_eps": 1e-6,
}
"""Keys of verl's, each with a value that changes a policy."""


def values_of(key: str, value: Any) -> dict[str, Any]:
    """The values of a policy, by their paths, under this value of one of verl's keys."""
    of_model = model(
        hf_config=SimpleNamespace(num_nextn_predict_layers=1),
        lora={"rank": 8},
        mtp={"enable": True, "enable_train": True},
    )
    found = sections_with(key, value, model=of_model, optim=optim(lr_decay_steps=40))
    return dict(leaves(translate(*found.values(), replicas=4).policy))


def leaves(section: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{at}{name}.")
        else:
            yield at + name, value


@pytest.mark.parametrize("key", CHANGED)
def test_what_a_key_of_verls_changes_is_known_by_that_name(key: str) -> None:
    before, after = values_of("engine.seed", 42), values_of(key, CHANGED[key])
    paths = {path for path, value in after.items() if before.get(path, ...) != value}
    assert paths and key in {name_in_verl(path) for path in paths}


def test_an_error_of_a_policy_says_where_verl_has_its_keys() -> None:
    told = translate(model(), engine(expert_model_parallel_size=3), optim(lr=-1.0), replicas=1)
    place = r"policy\.megatron_cfg\.optimizer\.lr is optim\.lr$"
    with pytest.raises(ConfigError, match=place), with_verl_names():
        told.parse()
    told = translate(model(), engine(expert_model_parallel_size=3), optim(), replicas=1)
    key = "expert_model_parallel_size"
    place = rf"policy\.megatron_cfg\.{key} is engine\.{key}$"
    with pytest.raises(ConfigError, match=place), with_verl_names():
        topology_of(told.parse(), 2)


def test_errors_that_name_no_key_of_a_policy_stay_as_they_are() -> None:
    for error in (
        ConfigError("see policy.py and policy.memory.onload()"),
        BatchError("policy.seed"),
    ):
        with pytest.raises(type(error)) as found, with_verl_names():
            raise error
        assert found.value is error
