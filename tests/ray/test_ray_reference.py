"""The reference that a configuration names, under the driver: with adapters on the policy, whose
reference is another checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import Policy
from megatron_policy.errors import ConfigError
from megatron_policy.workers import RayVirtualCluster
from tests.losses import TokenNLL
from tests.ray.policies import DP2, GBS, TOKENIZER, VOCAB, batch, config_of
from tests.ray.test_ray_training import assert_logprobs

LORA = {"peft": {"enabled": True, "dim": 4, "alpha": 8.0, "lora_B_init_method": "normal"}}


def reference_of(policy: Policy) -> torch.Tensor:
    found: torch.Tensor = policy.get_reference_policy_logprobs(batch())["reference_logprobs"]
    return found


@pytest.mark.nightly
def test_the_drivers_reference_is_the_checkpoint_that_is_named(
    checkpoint: Callable[..., Path],
) -> None:
    other = checkpoint("qwen2", vocab=VOCAB, seed=3)
    config = config_of(checkpoint, DP2 | LORA) | {"reference_model_name": str(other)}
    cluster, data = RayVirtualCluster([2], use_gpus=False), batch()
    with pytest.raises(ConfigError, match="leave the key out, or let the policy have a reference"):
        Policy(cluster, config, TOKENIZER, init_reference_model=False)
    missing: dict[str, Any] = {"reference_model_name": str(other / "nothing")}
    with pytest.raises(ConfigError, match=r"reference_model_name: model .* is not a directory"):
        Policy(cluster, config | missing, TOKENIZER)
    policy = Policy(cluster, config, TOKENIZER)
    try:
        before = policy.get_logprobs(data)["logprobs"]
        assert_logprobs(
            policy.get_reference_policy_logprobs(data)["reference_logprobs"], other, data
        )
        policy.prepare_for_training()
        policy.train(data, TokenNLL(), gbs=GBS)
        policy.prepare_for_lp_inference()
        assert not torch.equal(policy.get_logprobs(data)["logprobs"], before)
        assert_logprobs(
            policy.get_reference_policy_logprobs(data)["reference_logprobs"], other, data
        )
    finally:
        policy.shutdown()
        cluster.shutdown()
