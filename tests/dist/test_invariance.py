"""No layout and no way to make microbatches changes a result: every cell of the table against one
process of Hugging Face; docs/invariance.md says what that means and what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.batch import BatchedDataDict
from megatron_policy.packing.bins import ALGORITHMS, BALANCED
from tests import margins
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FAMILIES,
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
)
from tests.exact import ROOM
from tests.families import SAMPLES
from tests.invariance import cases, page
from tests.invariance.array import ARRAY, legal_cells, pairs_of
from tests.invariance.cases import (
    CELLS,
    FSDP1_CELLS,
    FURTHER_FSDP1_CELLS,
    FURTHER_FSDP2_CELLS,
    FURTHER_TENSOR_PARALLEL_CELLS,
    TENSOR_PARALLEL_CELLS,
    Cell,
    config_of,
)
from tests.invariance.compare import Results, differences
from tests.invariance.drawn import draw_cell
from tests.invariance.measure import LOSSES, run_cell
from tests.invariance.mutations import MUTATIONS, run_broken
from tests.invariance.oracle import data_of, few, rounding, truth
from tests.oracle import CLIP

FURTHER_CELLS = (*FURTHER_FSDP2_CELLS, *FURTHER_FSDP1_CELLS, *FURTHER_TENSOR_PARALLEL_CELLS)


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[Cell, dict[str, page.Found]]]:
    """The worst differences of the cells that were run."""
    found: dict[Cell, dict[str, page.Found]] = {}
    yield found
    if os.environ.get(page.WRITE):
        page.write(found)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.daily] * (cell in ARRAY))
        for cell in dict.fromkeys((*ARRAY, *CELLS, *FURTHER_CELLS))
    ],
)
def test_cell_equals_hf_computing_each_sequence_alone(
    ranks, checkpoint, measured, cell: Cell
) -> None:
    path = path_of(checkpoint, cell)
    results = run(ranks, path, cell)
    assert_microbatches_are_what_the_cell_says(cell, results)
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)
    if cell in CELLS:
        measured[cell] = {name: page.Found(value, allowed[name]) for name, value in found.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("family", SAMPLES)
def test_a_cell_that_nobody_chose_equals_hf_computing_each_sequence_alone(
    ranks, checkpoint, family: str
) -> None:
    cell, path = draw_cell(family, checkpoint)
    results = run(ranks, path, cell)
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for name, value in found.items():
        margins.check(name, value, allowed[name], found)


def path_of(checkpoint: Callable[..., Path], cell: Cell) -> Path:
    """The checkpoint of a cell's family; `checkpoint` is the fixture."""
    return checkpoint(cell.family, **cases.MODELS[cell.family])


def run(ranks: Any, path: Path, cell: Cell) -> Results:
    return ranks.run(cell.of.world, run_cell, cell, config_of(cell, path), rows_of(cell, path))


def rows_of(cell: Cell, path: Path) -> BatchedDataDict:
    return few(data_of(path, cell.temperature), cell.rows)


def compared(cell: Cell, path: Path, results: Results) -> dict[str, float]:
    expected, rounded = truth(cell, path), rounding(cell, path)
    return differences(cell, path, rows_of(cell, path), expected, rounded, results)


def tolerances(cell: Cell, path: Path) -> dict[str, float]:
    """Of every quantity of a cell: what rounding can explain, see `tests/exact.py`."""
    return {name: ROOM * error for name, error in rounding(cell, path).items()}


def assert_microbatches_are_what_the_cell_says(cell: Cell, results: Results) -> None:
    """A replica runs several, by tokens not all alike; of few rows there are too few for all."""
    for step in range(cases.STEPS):
        by_replica = {
            seen["coords"].dp: seen["steps"][step]["microbatch_metrics"].get("lengths", [])
            for seen in results
        }
        sizes = [size for each in by_replica.values() for size in each]
        if cell.rows < cell.microbatches:
            assert 0 < len(sizes) < cell.microbatches, by_replica
        else:
            assert max(map(len, by_replica.values())) > 1, by_replica
            assert len(set(sizes)) > 1, by_replica


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_package_that_is_broken_in_one_place_fails_the_comparison(
    ranks, checkpoint, name: str
) -> None:
    mutation = MUTATIONS[name]
    path, cell = path_of(checkpoint, mutation.cell), mutation.cell
    data = rows_of(cell, path)
    results = ranks.run(cell.of.world, run_broken, name, config_of(cell, path), data)
    found, allowed = compared(cell, path, results), tolerances(cell, path)
    for quantity in mutation.breaks:
        assert not found[quantity] <= 10 * allowed[quantity], (quantity, found, allowed)
    for quantity in mutation.keeps:
        assert found[quantity] <= allowed[quantity], (quantity, found, allowed)


def test_all_choices_meet_two_by_two_in_the_cells_of_every_day() -> None:
    everywhere = set().union(*map(pairs_of, legal_cells()))
    assert everywhere == set().union(*map(pairs_of, ARRAY))
    assert len(set(ARRAY)) == len(ARRAY) < 60


LEARNED = {(cell.family, cell.loss_in_words): cell for cell in CELLS if cell.full}
"""A cell of each family with each of its losses."""


@pytest.mark.parametrize("key", LEARNED, ids=" | ".join)
def test_two_steps_move_every_matrix_by_more_than_a_hundred_tolerances(
    checkpoint, key: tuple[str, str]
) -> None:
    cell = LEARNED[key]
    path = path_of(checkpoint, cell)
    oracle, rounded = truth(cell, path), rounding(cell, path)
    for name, weight in oracle.weights.items():
        if weight.dim() > 1:
            moved = (weight - oracle.start[name]).abs().max()
            assert moved > 100 * ROOM * rounded["weights"], name
    moved = (oracle.after.logprobs_BS - oracle.before.logprobs_BS).abs().max()
    assert moved > 1000 * ROOM * rounded["logprobs after"]
    assert min(map(abs, [*oracle.losses, *oracle.evaluated])) > 0.1, "relative to next to nothing"


WITH_EXPERTS = [cell for cell in CELLS if cell.family in cases.EXPERT_LOSSES]
CHOOSING = [cell for cell in ARRAY if cell.family in cases.EXPERT_LOSSES]
DENSE = [cell for cell in CELLS if cell.family not in cases.EXPERT_LOSSES and not cell.fsdp]


@pytest.mark.parametrize("cell", (*CHOOSING, *WITH_EXPERTS), ids=lambda cell: cell.name)
def test_no_token_is_about_to_take_another_expert(checkpoint, cell: Cell) -> None:
    """Else rounding alone could choose other experts, and no tolerance would tell why."""
    closest = truth(cell, path_of(checkpoint, cell)).closest
    assert cases.CLOSEST < closest < 1


def test_the_table_has_every_layout_and_every_loss_with_every_batching() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    for name in cases.LAYOUTS:
        own = [cell for cell in DENSE if cell.layout == name and cell.rows == cases.ROWS]
        assert {cell.batching for cell in own} == set(cases.BATCHINGS)
        assert {cell.loss for cell in own} >= set(cases.LOSSES)
        assert {cell.family for cell in own} == set(FAMILIES.values())
    for loss in LOSSES:
        assert {cell.batching for cell in DENSE if cell.loss == loss} == set(cases.BATCHINGS)
    for loss in cases.LOSSES:
        for family in FAMILIES.values():
            own = [cell for cell in DENSE if cell.loss == loss and cell.family == family]
            assert {cell.batching for cell in own} == set(cases.BATCHINGS)


def test_the_table_has_every_layout_and_every_family_of_experts_with_every_batching() -> None:
    whole = [cell for cell in WITH_EXPERTS if cell.full]
    for name in EXPERT_LAYOUTS:
        own = [cell for cell in whole if cell.layout == name]
        assert {cell.batching for cell in own} == set(cases.BATCHINGS)
        assert len({cell.family for cell in own}) == len(own) == 3
        assert {cell.clip for cell in own} == {CLIP, cases.UNCLIPPED}
    for family in cases.EXPERT_LOSSES:
        own = [cell for cell in whole if cell.family == family]
        assert {cell.batching for cell in own} == set(cases.BATCHINGS)
        assert {cell.clip for cell in own} == {CLIP, cases.UNCLIPPED}
    for loss in cases.LOSSES:
        own = [cell for cell in whole if cell.loss == loss]
        assert {cell.batching for cell in own} == set(cases.BATCHINGS)


def test_the_table_has_every_layout_of_fsdp2_and_the_rest_of_their_product_is_swept() -> None:
    own = [cell for cell in CELLS if cell.layout in FSDP2_LAYOUTS]
    for name in FSDP2_LAYOUTS:
        assert {cell.batching for cell in own if cell.layout == name} == set(cases.BATCHINGS)
    for family in cases.FSDP2_LOSSES:
        assert {cell.batching for cell in own if cell.family == family} == set(cases.BATCHINGS)
    assert {cell.loss for cell in own} == set(LOSSES)
    product = {(cell.layout, cell.batching, cell.family) for cell in (*own, *FURTHER_FSDP2_CELLS)}
    assert len(product) == len(own) + len(FURTHER_FSDP2_CELLS) == 4 * len(own)


@pytest.mark.parametrize(
    ("layouts", "own", "further"),
    [
        (FSDP2_TENSOR_LAYOUTS, TENSOR_PARALLEL_CELLS, FURTHER_TENSOR_PARALLEL_CELLS),
        (FSDP1_LAYOUTS, FSDP1_CELLS, FURTHER_FSDP1_CELLS),
    ],
)
def test_the_table_has_every_layout_and_the_rest_of_the_product_is_swept(
    layouts: dict[str, Any], own: tuple[Cell, ...], further: tuple[Cell, ...]
) -> None:
    assert set(own) <= set(CELLS)
    assert {cell.layout for cell in own} == set(layouts)
    assert {cell.batching for cell in own} == set(cases.BATCHINGS)
    assert len({cell.family for cell in own}) == len(own)
    product = {(cell.layout, cell.batching, cell.family) for cell in (*own, *further)}
    everything = len(layouts) * len(cases.BATCHINGS) * len(cases.FSDP2_LOSSES)
    assert len(product) == len(own) + len(further) == everything


def test_the_table_has_every_packing_algorithm_and_every_loss_at_another_temperature() -> None:
    packed = [cell.algorithm for cell in CELLS if cell.batching == "packed"]
    assert set(packed) == set(ALGORITHMS)
    assert min(map(packed.count, ALGORITHMS)) > 1
    assert 2 * packed.count(BALANCED) >= len(packed)
    warm = [cell for cell in CELLS if cell.temperature != 1]
    assert {cell.loss for cell in warm} == set(LOSSES)
    assert {cell.batching for cell in warm} == set(cases.BATCHINGS)
    assert len(warm) == len(cases.TEMPERED)
