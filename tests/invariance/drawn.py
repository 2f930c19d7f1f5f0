"""A cell for a family that nobody chose: the layout, the way to make microbatches, the loss and the
model's weights are drawn. `make nightly` draws others every day.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.packing.bins import ALGORITHMS
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    SIZES,
)
from tests.families import EXPERTS
from tests.invariance.cases import BATCHINGS, CLOSEST, LAYOUTS, LOSSES, UNCLIPPED, Cell, config_of
from tests.invariance.oracle import truth
from tests.oracle import CLIP

SEED = "LAYOUT_SEED"
"""The environment variable that says what is drawn; `tests/conftest.py` sets it to the day's number
where it is not set.
"""
OF_FSDP = (*FSDP2_LAYOUTS, *FSDP2_TENSOR_LAYOUTS, *FSDP1_LAYOUTS)
DRAWS = 50


def draw_cell(family: str, checkpoint: Callable[..., Path]) -> tuple[Cell, Path]:
    """A cell that `inspect-config` takes, and the checkpoint of its model, in which no token is
    about to take another expert.
    """
    random = Random(f"{os.environ[SEED]} {family}")
    layouts = (*(EXPERT_LAYOUTS if family in EXPERTS else LAYOUTS), *OF_FSDP)
    for _ in range(DRAWS):
        cell = Cell(
            random.choice(layouts),
            random.choice(BATCHINGS),
            random.choice(LOSSES),
            family,
            algorithm=random.choice(ALGORITHMS),
            clip=random.choice((CLIP, UNCLIPPED)),
        )
        path = checkpoint(family, **SIZES, seed=random.randrange(1000))
        if is_taken(cell, path) and truth(cell, path).closest > CLOSEST:
            print(f"{SEED}={os.environ[SEED]} drew {cell.name}")
            return cell, path
    raise AssertionError(f"{SEED}={os.environ[SEED]}: none of {DRAWS} cells of {family} is taken")


def is_taken(cell: Cell, path: Path) -> bool:
    """Whether `inspect-config` takes the cell's configuration."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config_of(cell, path)))
        arguments = ["inspect-config", str(file), "--world-size", str(cell.of.world)]
        return CliRunner().invoke(app, arguments).exit_code == 0
