"""The notebook runs from its first cell to its last, and is stored with what its cells show."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from examples.pictures.tour import TOUR, executed

NOTEBOOK = json.loads(TOUR.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


def without_numbers(text: str) -> str:
    """What rounding does not change; fields of config.json differ between releases."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", text.partition("\nconfig.json\n")[0])


@pytest.mark.nightly
def test_the_cells_of_the_tour_run_in_order_and_show_what_is_stored() -> None:
    ran = executed(NOTEBOOK)
    cells = code_cells(ran)
    said = "\n".join(map(printed, cells))
    assert "linear_qkv" in said and "pipeline, 2 stages" in said
    assert "log-probabilities differ by at most" in said
    for cell, stored in zip(cells, code_cells(NOTEBOOK), strict=True):
        assert without_numbers(printed(cell)) == without_numbers(printed(stored))
        kinds = [[output["output_type"] for output in each["outputs"]] for each in (cell, stored)]
        assert kinds[0] == kinds[1]


def test_every_cell_that_prints_or_draws_is_stored_with_what_it_shows() -> None:
    for number, cell in enumerate(code_cells(NOTEBOOK), start=1):
        source = "".join(cell["source"])
        wanted = ["stream"] * ("print(" in source) + ["display_data"] * ("plt.show()" in source)
        assert [output["output_type"] for output in cell["outputs"]] == wanted, source
        assert cell["execution_count"] == number
        assert {output.get("name", "stdout") for output in cell["outputs"]} <= {"stdout"}


def test_the_stored_picture_is_wide_enough_to_read_and_the_file_small() -> None:
    (drawn,) = (
        output["data"]["image/png"]
        for cell in code_cells(NOTEBOOK)
        for output in cell["outputs"]
        if "data" in output
    )
    with Image.open(BytesIO(base64.b64decode(drawn, validate=True))) as image:
        assert image.format == "PNG" and image.width >= 1200 and not image.info.get("Software")
    assert TOUR.stat().st_size < 100_000


def test_the_stored_notebook_says_nothing_of_the_machine_that_ran_it() -> None:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert NOTEBOOK["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}
    assert all(cell["metadata"] == {} for cell in NOTEBOOK["cells"])
    for text in map(printed, code_cells(NOTEBOOK)):
        assert not re.search(r"(^|[\s'\"=(])/\w", text), "an absolute path"
        assert not re.search(r"warning|\d(\.\d+)? ?m?s\b", text, re.IGNORECASE)
