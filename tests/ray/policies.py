"""The tiny policies that the tests of the driver share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_policy import Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.workers import RayVirtualCluster
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl
from tests import oracle
from tests.dist.cases import policy_config

VOCAB, LENGTH, ROWS, GBS = 251, 12, 8, 4
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
DP2: dict[str, Any] = {}
FSDP2: dict[str, Any] = {"dtensor_cfg": {}}

PolicyMaker = Callable[..., Policy]


def config_of(
    checkpoint: Callable[..., Path], layout: dict[str, Any], path: Path | None = None
) -> dict[str, Any]:
    return policy_config(
        path or checkpoint("qwen2", vocab=VOCAB),
        layout,
        train_global_batch_size=GBS,
        generation={"max_new_tokens": 6, "stop_token_ids": []},
    )


@contextmanager
def opened(config: dict[str, Any], **options: Any) -> Iterator[Policy]:
    """A policy over two workers on CPUs, which are gone afterwards."""
    cluster = RayVirtualCluster([2], use_gpus=False)
    policy = Policy(cluster, config, TOKENIZER, **options)
    try:
        yield policy
    finally:
        assert policy.shutdown()
        cluster.shutdown()


def under_the_reference(worker: MegatronPolicyWorkerImpl, data: BatchedDataDict) -> torch.Tensor:
    """Runs in the worker: log-probabilities under its reference, then it computes on its own."""
    with worker.use_reference_model():
        return worker.get_logprobs(data)["logprobs"]


def batch(seed: int = 0, rows: int = ROWS) -> BatchedDataDict:
    return oracle.make_batch(rows, LENGTH, VOCAB, seed)
