"""The invariance table over NCCL, and the Transformer Engine path, where there are GPUs for it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.dist.cases import policy_config, train_two_steps
from tests.dist.layouts import FAMILIES, LAYOUTS, VOCAB
from tests.dist.test_invariance import compared, path_of, rows_of, tolerances
from tests.dist.test_layouts import (
    BF16_LR,
    assert_steps_like_hf,
    assert_weights_like_hf,
    data,
    expected,
)
from tests.invariance import cases
from tests.invariance.cases import Cell, config_of
from tests.invariance.measure import run_cell
from tests.margins import check

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
    gpu_ranks, checkpoint, cell: Cell
) -> None:
    """Within the tolerances of the CPU: another order of sums is what they are made for."""
    path = path_of(checkpoint, cell)
    config = config_of(cell, path)
    config["megatron_cfg"]["transformer_impl"] = "local"
    results = gpu_ranks.run(cell.of.world, run_cell, cell, config, rows_of(cell, path))
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        check(name, value, allowed[name], found)


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
    gpu_ranks, bf16_checkpoints, name: str, tied: bool, implementation: str
) -> None:
    """As near to fp64 as transformers on the CPU is, up to the same factors as on the CPU."""
    path, case = bf16_checkpoints[tied], LAYOUTS[name]
    megatron = case.megatron | {"transformer_impl": implementation}
    config = policy_config(path, megatron, lr=BF16_LR, precision="bfloat16")
    hf = expected(path)
    for seen in gpu_ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert_steps_like_hf(seen, hf)
        assert_weights_like_hf(path, case.tp, seen, hf)
