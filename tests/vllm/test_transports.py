"""Every transport that reaches another process, into a real vLLM with one worker and with two, from
policies in every layout: after each refit the engine computes what the policy does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.exact import ROOM, Exact, assert_equal, furthest, load_hf
from tests.vllm.engines import options_of
from tests.vllm.sessions import LAYOUTS, NEW, PROMPTS, SIZES, TRANSPORTS, Handed, follow

CELLS: list[tuple[str, int, list[str]]] = [
    ("tp2", 1, ["stream", "collective"]),
    ("tp2", 2, ["handles", "directory"]),
    ("pp2", 1, ["handles", "directory"]),
    ("pp2", 2, ["stream", "collective"]),
    ("ep2", 1, ["stream", "directory"]),
    ("ep2", 2, ["handles", "collective"]),
    ("fsdp2", 1, ["collective", "handles"]),
    ("fsdp2", 2, ["stream", "directory"]),
    ("packed", 1, ["stream", "handles"]),
    ("packed", 2, ["collective", "directory"]),
    ("tp2", 1, ["deltas", "deltas", "stream", "deltas"]),
    ("ep2", 2, ["deltas", "deltas"]),
    ("frozen", 1, ["delta stream"] * 4),
    ("frozen", 2, ["delta stream"] * 3),
    ("tp2", 1, ["adapters", "adapters"]),
    ("pp2", 2, ["adapters"]),
    ("packed", 1, ["adapters"]),
]
"""A layout, the engine's workers, and the transports of one policy, one after the other."""

WITHOUT_ADAPTERS = {
    "fsdp2": "this engine trains none",
    "ep2": "with adapters vLLM wants kernels of Triton for experts",
}


def test_the_cells_cover_every_pair() -> None:
    cells = [(layout, workers, each) for layout, workers, of in CELLS for each in of]
    assert {(layout, each) for layout, _, each in cells} == {
        (layout, each)
        for layout, each in itertools.product(LAYOUTS, TRANSPORTS)
        if each != "adapters" or layout not in WITHOUT_ADAPTERS
        if each != "deltas" or layout in ("tp2", "ep2")  # others: tests/dist/test_delta_refit.py
        if (each == "delta stream") == (layout == "frozen")  # tests/dist/test_delta_stream.py
    }
    assert {cell[:2] for cell in cells} == {*itertools.product(LAYOUTS, (1, 2))}
    assert {cell[1:] for cell in cells} == {*itertools.product((1, 2), TRANSPORTS)}


def greedy_of(path: Path) -> list[list[int]]:
    """What transformers continue the prompts with, of those weights."""
    tokens, model = torch.tensor(PROMPTS), load_hf(path)
    with torch.no_grad():
        for _ in range(NEW):
            best = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
    return tokens[:, -NEW:].tolist()


def check(handed: Handed, step: int, before: Exact | None) -> Exact:
    """The engine has the weights of that step, and computes with them."""
    tokens = torch.tensor(handed.rows)
    exact = Exact.of(handed.exported, lambda model: oracle.hf_logprobs(model, tokens))
    assert handed.said == (step, (step, False)), handed.transport
    assert_equal("policy", handed.policy, exact, handed.transport)
    assert_equal("engine", handed.scored, exact, handed.transport)
    sampled = exact[: len(PROMPTS), -NEW:]
    assert_equal("engine, of its samples", handed.drawn, sampled, handed.transport)
    assert handed.greedy == greedy_of(handed.exported), handed.transport
    if before is not None:
        moved = furthest(exact[len(PROMPTS) :].value, before[len(PROMPTS) :].value)
        assert moved > 100 * ROOM * exact.rounding, "old weights would not be seen"
    return exact


def name_runs(transports: list[str]) -> str:
    """Each transport, and how many times in turn if that is many."""
    runs = [(name, len([*same])) for name, same in itertools.groupby(transports)]
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in runs)


@pytest.mark.parametrize(
    ("layout", "workers", "transports"),
    [
        pytest.param(
            *cell,
            id=f"{cell[0]} to {cell[1]}: {name_runs(cell[2])}",
            marks=[pytest.mark.daily] if cell is CELLS[0] else [],
        )
        for cell in CELLS
    ],
)
def test_an_engine_computes_what_the_policy_does(
    ranks: Any,
    engine: Callable[..., str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    layout: str,
    workers: int,
    transports: list[str],
) -> None:
    world, family, _, _ = LAYOUTS[layout]
    path = checkpoint(family, **SIZES)
    address = engine(path, **options_of(family, workers))
    staged = any("delta" in each for each in transports) or (
        workers == 2 and layout in ("tp2", "fsdp2")
    )
    seen, *_ = ranks.run(
        world, follow, address, layout, path, transports, workers, tmp_path, staged
    )
    before = None
    assert [handed.transport for handed in seen] == transports
    for step, handed in enumerate(seen, 1):
        before = check(handed, step, before)
