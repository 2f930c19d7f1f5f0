"""A detached refit of weights on GPUs: through page-locked memory, on a stream of its own, while
training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import refit_engine as engine
from tests.dist.test_detached_refit import (
    CASES,
    SIZES,
    check_moment,
    forms_of,
    start_held_up,
    train_meanwhile,
)
from tests.other_process import OtherProcess


def refit_beside_training(gpu_ranks: Any, path: Path, folder: Path, case: str) -> None:
    _, world, section = CASES[case]
    process, address = OtherProcess(clean=True, on_gpu=True), f"ipc://{folder}/t.sock"
    process.call(start_held_up, forms_of(path), folder)
    try:
        process.begin(engine.receive, address)
        check_moment(process, gpu_ranks.run(world, train_meanwhile, path, section, address, folder))
    finally:
        process.kill()


@pytest.mark.gpu
def test_an_engine_gets_the_weights_of_the_moment_from_a_gpu(
    gpu_ranks: Any, checkpoint: Any, tmp_path: Path
) -> None:
    refit_beside_training(gpu_ranks, checkpoint("qwen2", **SIZES), tmp_path, "one")


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("case", ["tp2", "pp2", "fsdp2"])
def test_so_it_does_from_several(
    gpu_ranks: Any, checkpoint: Any, tmp_path: Path, case: str
) -> None:
    refit_beside_training(gpu_ranks, checkpoint("qwen2", **SIZES), tmp_path, case)
