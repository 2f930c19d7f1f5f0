"""`python -m examples.pictures.tour`: runs examples/tour.ipynb, and stores it with what its cells
print and draw. Progress bars, which are on stderr, are left out.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TOUR = Path(__file__).parents[1] / "tour.ipynb"
DPI, SHOWN_DPI = 160, 100
COLORS = 64
TIMEOUT_S = 1800  # it takes a minute on a free machine


def main() -> None:
    """Run the notebook, and write it anew."""
    notebook = executed(json.loads(TOUR.read_text(encoding="utf-8")))
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    TOUR.write_text(f"{text}\n", encoding="utf-8")


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run in order in one fresh process."""
    cells = [dict(cell) for cell in notebook["cells"]]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    with TemporaryDirectory() as folder:
        sources, outputs = (Path(folder, name) for name in ("sources.json", "outputs.json"))
        sources.write_text(json.dumps(["".join(cell["source"]) for cell in code]))
        inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "RAY_ADDRESS")}
        subprocess.run(
            # Of this folder the cells import nothing.
            [sys.executable, "-P", __file__, str(sources), str(outputs)],
            cwd=TOUR.parent,  # where Jupyter starts the kernel of a notebook
            env=inherited | {"MPLBACKEND": "Agg"},
            check=True,
            timeout=TIMEOUT_S,
        )
        results = json.loads(outputs.read_text())
    for number, (cell, result) in enumerate(zip(code, results, strict=True), start=1):
        cell |= {"execution_count": number, "outputs": result}
    return notebook | {"cells": cells}


def run_cells(sources: list[str]) -> list[list[dict[str, Any]]]:
    """The outputs of each cell: what it prints, and the figures that it leaves open."""
    names: dict[str, Any] = {"__name__": "__main__"}
    results = []
    for number, source in enumerate(sources, start=1):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(source, f"cell {number}", "exec"), names)
        lines = printed.getvalue().splitlines(keepends=True)
        text = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        results.append([*text, *_figures()])
    return results


def _figures() -> list[dict[str, Any]]:
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    found = [_picture(plt.figure(number)) for number in plt.get_fignums()]
    plt.close("all")
    return found


def _picture(figure: Any) -> dict[str, Any]:
    from PIL import Image

    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=DPI)
    # A palette makes the file a third as large.
    Image.open(drawn).convert("RGB").quantize(COLORS).save(small, "PNG", optimize=True)
    width, height = (round(inches * SHOWN_DPI) for inches in figure.get_size_inches())
    return {
        "data": {"image/png": base64.b64encode(small.getvalue()).decode()},
        "metadata": {"image/png": {"height": height, "width": width}},
        "output_type": "display_data",
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given, made = map(Path, sys.argv[1:])
        made.write_text(json.dumps(run_cells(json.loads(given.read_text()))))
    else:
        main()
