"""Keys of expert layers that only GPUs honour change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.cases import GLOBAL_BATCH, open_policy, policy_config
from tests.dist.layouts import LENGTH, VOCAB
from tests.losses import SequenceNLL
from tests.oracle import make_batch


def learnt(config: dict[str, Any], asked: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Log-probabilities, loss and every gradient of a step; the model has what was asked for."""
    with open_policy(config, init_reference_model=False) as policy:
        (model,) = policy._engine.pipeline.models
        held = {key: bool(getattr(model.config, key)) for key in (OVERLAP, FUSION)}
        assert held == {OVERLAP: OVERLAP in asked, FUSION: FUSION in asked}
        data = make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
        logprobs = policy.logprobs(data)
        loss = policy.train(data, SequenceNLL())["loss"]
        gradients = {
            name: p.main_grad.detach().cpu().clone()
            for name, p in policy.named_parameters()
            if hasattr(p, "main_grad")
        }
        return {"log-probabilities": logprobs.cpu(), "loss": loss.cpu()} | gradients


OVERLAP, FUSION = "moe_shared_expert_overlap", "moe_permute_fusion"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "asked"),
    [
        ("local", (OVERLAP,)),
        ("transformer_engine", (OVERLAP,)),
        ("transformer_engine", (FUSION,)),
        ("transformer_engine", (OVERLAP, FUSION)),
    ],
)
def test_overlapped_shared_experts_and_fused_permutation_compute_the_same(
    gpu_ranks, checkpoint, implementation: str, asked: tuple[str, ...]
) -> None:
    if implementation == "transformer_engine":
        pytest.importorskip("transformer_engine")
    path = checkpoint("deepseek_v3")
    wide = {"transformer_impl": implementation, "moe_token_dispatcher_type": "alltoall"}
    configs = [
        policy_config(path, wide | dict.fromkeys(keys, True), max_grad_norm=0.0)
        for keys in ((), asked)
    ]
    (plain,), (other,) = (
        gpu_ranks.run(1, learnt, config, keys)
        for config, keys in zip(configs, ((), asked), strict=True)
    )
    assert plain.keys() == other.keys() and len(plain) > 10
    for name, expected in plain.items():
        # The same products in fp32, added up in another order.
        size = float(expected.norm()) or 1.0
        assert float((other[name] - expected).norm()) <= 1e-5 * size, name
