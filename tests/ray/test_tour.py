"""The notebook runs from its first cell to its last, and is stored without what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.turns import in_turn

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(TOUR.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@in_turn(1)
def test_the_cells_of_the_tour_run_in_order_and_what_they_claim_holds() -> None:
    script = "\n".join("".join(cell["source"]) for cell in code_cells())
    inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=TOUR.parent,  # where Jupyter starts the kernel of a notebook
        env=inherited | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "linear_qkv" in done.stdout and "pipeline, 2 stages" in done.stdout
    assert "log-probabilities differ by at most" in done.stdout


def test_the_tour_is_stored_without_outputs() -> None:
    for cell in code_cells():
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
