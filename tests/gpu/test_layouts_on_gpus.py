"""The layout table over NCCL, and the Transformer Engine path, where there are GPUs for it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.dist.cases import policy_config, train_two_steps
from tests.dist.layouts import FAMILIES, LAYOUTS, VOCAB
from tests.dist.test_layouts import (
    BF16_LR,
    assert_bf16_weights_like_hf,
    assert_metrics_complete,
    assert_reads_like_hf,
    assert_trained_like_hf,
    assert_weights_like_hf,
    data,
    expected,
)

WITH_TE = importlib.util.find_spec("transformer_engine") is not None
CASES = [
    pytest.param(
        name, marks=pytest.mark.gpu if case.world == 1 else pytest.mark.multi_gpu(case.world)
    )
    for name, case in LAYOUTS.items()
]


@pytest.fixture(autouse=True)
def exact_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 products in fp32 on both sides: TF32 would be the difference that is measured."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")


@pytest.mark.parametrize("tied", FAMILIES, ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_layout_on_gpus_equals_one_process_of_hf(
    gpu_ranks, checkpoints, name: str, tied: bool
) -> None:
    """Loss and norm 1e-4 relative: GPU kernels sum in another order than the CPU oracle."""
    path, case = checkpoints[tied], LAYOUTS[name]
    config = policy_config(path, case.megatron | {"transformer_impl": "local"})
    for loss in ("token", "sequence"):
        results = gpu_ranks.run(
            case.world, train_two_steps, config, loss, data(), VOCAB, loss == "token"
        )
        assert_metrics_complete(results, loss)
        for seen in results:
            assert_trained_like_hf(path, case.tp, seen, expected(path, loss), rel=1e-4)
            assert_weights_like_hf(path, case.tp, seen, expected(path, loss), atol=1e-5)
            if loss == "token":
                assert_reads_like_hf(path, seen)


IMPLEMENTATIONS = [
    "local",
    pytest.param(
        "transformer_engine",
        marks=pytest.mark.skipif(not WITH_TE, reason="transformer_engine is not installed"),
    ),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tied", FAMILIES, ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_bf16_on_gpus_equals_hf(
    gpu_ranks, checkpoints, name: str, tied: bool, implementation: str
) -> None:
    """bf16 against bf16, as on the CPU: loss and norm within 2 %, weights within one ulp."""
    path, case = checkpoints[tied], LAYOUTS[name]
    megatron = case.megatron | {"transformer_impl": implementation}
    config = policy_config(path, megatron, lr=BF16_LR, precision="bfloat16")
    hf = expected(path, "token", torch.bfloat16, BF16_LR)
    for seen in gpu_ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert_trained_like_hf(path, case.tp, seen, hf, rel=2e-2)
        assert_bf16_weights_like_hf(path, case.tp, seen, hf)
