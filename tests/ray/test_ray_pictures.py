"""Pictures over real workers: the driver sends pixels in the dtype in which towers compute, and
what comes back is what a policy without Ray makes of the pixels as they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.registry import FAMILIES, PREPARED
from megatron_policy.workers import RayVirtualCluster
from megatron_policy.workers import policy as driver
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl
from tests.dist.cases import LOSSES, open_policy, policy_config
from tests.picture_models import make_model, make_rows
from tests.ray.policies import TOKENIZER


class PreparedWorker(MegatronPolicyWorkerImpl):
    """A worker that takes the families that are not offered yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        FAMILIES.update(PREPARED)
        super().__init__(*args, **kwargs)


def train_alone(config: dict[str, Any], rows: BatchedDataDict) -> dict[str, Any]:
    """Log-probabilities and a step of one process."""
    with pytest.MonkeyPatch.context() as patch:
        for family, prepared in PREPARED.items():
            patch.setitem(FAMILIES, family, prepared)
        with open_policy(config) as policy:
            return {
                "logprobs": policy.logprobs(rows),
                "step": policy.train(rows, LOSSES["token"](), gbs=8, mbs=1),
                "after": policy.logprobs(rows),
            }


@pytest.mark.nightly
def test_pixels_in_the_dtype_of_the_towers_give_what_wider_ones_give(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows("qwen3_vl")
    config = policy_config(make_model(tmp_path / "hf", "qwen3_vl", torch.bfloat16), {})
    config |= {"precision": "bfloat16", "max_total_sequence_length": rows["input_ids"].size(1)}
    config |= {"train_micro_batch_size": 1, "logprob_batch_size": 1}
    config["megatron_cfg"] |= {"tensor_model_parallel_size": 1}
    (alone,) = ranks.run(1, train_alone, config, rows)
    for family, prepared in PREPARED.items():
        monkeypatch.setitem(FAMILIES, family, prepared)
    monkeypatch.setattr(driver, "MegatronPolicyWorker", ray.remote(PreparedWorker))
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
