"""The invariance table over NCCL, and the Transformer Engine path, where there are GPUs for it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.dist.cases import policy_config, train_two_steps
from tests.dist.layouts import FAMILIES, LAYOUTS, VOCAB
from tests.dist.test_layouts import (
    BF16_LR,
    assert_bf16_weights_like_hf,
    assert_trained_like_hf,
    data,
    expected,
)
from tests.invariance import cases
from tests.invariance.cases import Cell, config_of
from tests.invariance.compare import QUANTITIES, differences
from tests.invariance.measure import run_cell
from tests.invariance.oracle import data_of, few, truth

WITH_TE = importlib.util.find_spec("transformer_engine") is not None


def on_gpus(world: int) -> pytest.MarkDecorator:
    return pytest.mark.gpu if world == 1 else pytest.mark.multi_gpu(world)


CASES = [pytest.param(name, marks=on_gpus(case.world)) for name, case in LAYOUTS.items()]
CELLS = [pytest.param(cell, marks=on_gpus(cell.of.world), id=cell.name) for cell in cases.CELLS]


@pytest.fixture(autouse=True)
def exact_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 products in fp32 on both sides: TF32 would be the difference that is measured."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")


@pytest.mark.parametrize("cell", CELLS)
def test_cell_on_gpus_equals_hf_computing_each_sequence_alone(
    gpu_ranks, checkpoints, cell: Cell
) -> None:
    """Losses, norms and metrics within 1e-4 relative: GPU kernels sum in another order than the CPU
    oracle. The rest within 1e-5, as on the CPU.
    """
    path = checkpoints[cell.tied]
    data = few(data_of(path), cell.rows)
    config = config_of(cell, path)
    config["megatron_cfg"]["transformer_impl"] = "local"
    results = gpu_ranks.run(cell.of.world, run_cell, cell, config, data)
    found = differences(cell, path, data, truth(path, cell.loss, cell.rows), results)
    sums = ("loss", "grad norm", "metrics")
    assert all(found[name] <= (1e-4 if name in sums else 1e-5) for name in QUANTITIES), found


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
    hf = expected(path)
    for seen in gpu_ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert_trained_like_hf(path, case.tp, seen, hf, rel=2e-2)
        assert_bf16_weights_like_hf(path, case.tp, seen, hf)
