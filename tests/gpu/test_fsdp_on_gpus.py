"""FSDP's own offload: parameters, gradients and optimizer state in page-locked host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.cases import GLOBAL_BATCH, fsdp_config, open_policy
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.dist.test_memory_states import parameters
from tests.losses import SequenceNLL
from tests.oracle import make_batch


def trained(config: dict[str, Any]) -> tuple[list[float], torch.Tensor, set[str]]:
    """Losses of two steps and a third's log-probabilities; where parameters are between steps."""
    with open_policy(config, init_reference_model=False) as policy:
        data = make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
        losses = [float(policy.train(data, SequenceNLL())["loss"]) for _ in range(2)]
        where = {p.device.type for p in parameters(policy)}
        return losses, policy.logprobs(data).cpu(), where


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("section", "key"), [("dtensor_cfg", "cpu_offload"), ("fsdp_cfg", "fsdp_offload_enabled")]
)
def test_what_is_offloaded_between_uses_trains_as_what_stays(
    gpu_ranks, checkpoint, section: str, key: str
) -> None:
    path = checkpoint("llama", **SIZES)
    (stays,), (leaves,) = (
        gpu_ranks.run(1, trained, fsdp_config(path, {key: offload}, section=section))
        for offload in (False, True)
    )
    assert stays[2] == {"cuda"} and leaves[2] == {"cpu"}
    # Adam runs on another processor, whose fp32 rounds otherwise.
    assert leaves[0] == pytest.approx(stays[0], rel=1e-5)
    torch.testing.assert_close(leaves[1], stays[1], rtol=1e-4, atol=1e-5)
