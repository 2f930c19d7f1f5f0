"""In a packed step the host never waits for the GPU, from when the batch is cut to the end of the
backward pass.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.training import step
from tests.dist.cases import GLOBAL_BATCH, open_policy, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.losses import Result, SequenceNLL, sequence_nll
from tests.oracle import make_batch

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}


class QueuedNLL(SequenceNLL):
    """Its metrics stay on the GPU: `.item()` in a loss waits."""

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> Result:
        loss = sequence_nll(next_token_logprobs, data, global_valid_seqs)
        return loss, {"loss": loss.detach()}


def step_without_waiting(config: dict[str, Any]) -> float:
    """The loss of a step in which torch raises where the host would wait."""
    run = step.run

    def strictly(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with open_policy(config, init_reference_model=False) as policy:
        data = make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
        policy.train(data, QueuedNLL())  # what is made once is made now
        with mock.patch.object(step, "run", strictly):
            return float(policy.train(data, QueuedNLL())["loss"])


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_packed_step_queues_all_its_work(gpu_ranks, checkpoint, recompute: bool) -> None:
    megatron = {"activation_checkpointing": recompute}
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, precision="bfloat16", **PACKED)
    (loss,) = gpu_ranks.run(1, step_without_waiting, config)
    assert loss > 0
