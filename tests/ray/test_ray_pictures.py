"""Pictures over real workers: the driver sends pixels in the dtype in which towers compute, and
what comes back is what a policy without Ray makes of the pixels as they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.workers import RayVirtualCluster
from tests.dist.cases import LOSSES, open_policy, policy_config
from tests.picture_models import make_model, make_rows
from tests.ray.policies import TOKENIZER


def train_alone(config: dict[str, Any], rows: BatchedDataDict) -> dict[str, Any]:
    """Log-probabilities and a step of one process."""
    with open_policy(config) as policy:
        return {
            "logprobs": policy.logprobs(rows),
            "step": policy.train(rows, LOSSES["token"](), gbs=8, mbs=1),
            "after": policy.logprobs(rows),
        }


@pytest.mark.nightly
def test_pixels_in_the_dtype_of_the_towers_give_what_wider_ones_give(
    ranks: Any, tmp_path: Path
) -> None:
    rows = make_rows("qwen3_vl")
    config = policy_config(make_model(tmp_path / "hf", "qwen3_vl", torch.bfloat16), {})
    config |= {"precision": "bfloat16", "max_total_sequence_length": rows["input_ids"].size(1)}
    config |= {"train_micro_batch_size": 1, "logprob_batch_size": 1}
    config["megatron_cfg"] |= {"tensor_model_parallel_size": 1}
    (alone,) = ranks.run(1, train_alone, config, rows)
    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = Policy(cluster, config, TOKENIZER)
    try:
        pixels = policy._batches._dispatcher.to_score(rows).shards[0]["pixel_values"]
        assert {each.dtype for each in pixels if each is not None} == {torch.bfloat16}
        assert torch.equal(policy.get_logprobs(rows)["logprobs"], alone["logprobs"])
        step = policy.train(rows, LOSSES["token"](), gbs=8, mbs=1)
        assert torch.equal(step["loss"], alone["step"]["loss"])
        assert torch.equal(step["grad_norm"], alone["step"]["grad_norm"])
        assert torch.equal(policy.get_logprobs(rows)["logprobs"], alone["after"])
    finally:
        assert policy.shutdown()
        cluster.shutdown()
