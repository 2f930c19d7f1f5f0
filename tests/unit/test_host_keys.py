"""Every key that NeMo RL knows is in the table of keys, and what it hands to Megatron-Core, too."""

from __future__ import annotations

import dataclasses

from megatron_policy.config.keys import KEYS, SECTIONS
from tests.hosts.host_keys import HOST_KEYS


def test_every_key_of_the_host_has_a_rule_of_its_own() -> None:
    known = {prefix + name for prefix, names in HOST_KEYS.items() for name in names.split()}
    assert known - KEYS.keys() == set()


def test_every_section_of_the_host_has_keys() -> None:
    ours = {"megatron_cfg.freeze_config.", "fsdp_cfg.", "metrics.", "metrics.wandb."}
    ours |= {"rollout_mismatch."}
    assert {prefix for prefix in SECTIONS if not HOST_KEYS.get(prefix)} <= ours


def test_every_field_of_megatron_cores_optimizer_has_a_rule() -> None:
    from megatron.core.optimizer import OptimizerConfig

    # The host hands this section on as it is.
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert fields - SECTIONS["megatron_cfg.optimizer."].keys() == set()
