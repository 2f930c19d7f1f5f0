"""Random numbers go on where they were captured, from every source that a rank draws from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_policy.device.random_states import capture, restore
from megatron_policy.engines.megatron.engine import MegatronEngine
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.errors import CheckpointError


class Megatron:
    """The engine's random numbers, which no model belongs to."""

    random_states = MegatronEngine.random_states
    set_random_states = MegatronEngine.set_random_states


ENGINE = Megatron()
Draws = dict[str, Callable[[], Any]]


def sources(generator: torch.Generator) -> Draws:
    def dropped(name: str) -> Any:
        with get_cuda_rng_tracker().fork(name):
            return F.dropout(torch.ones(64), 0.5).tolist()

    return {
        "python": lambda: [random.random(), random.gauss(0, 1)],
        "numpy": lambda: np.random.normal(size=3).tolist(),
        "torch": lambda: [torch.rand(3).tolist(), F.dropout(torch.ones(64), 0.5).tolist()],
        "forked": lambda: dropped("model-parallel-rng"),
        "forked again": lambda: dropped("another"),
        "sampling": lambda: torch.rand(3, generator=generator).tolist(),
    }


def go_on() -> None:
    """Asserts, on a rank, that the draws after `restore` are those after `capture`."""
    prepare_platform()
    generator = torch.Generator().manual_seed(5)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    tracker.add("another", 12)
    draws = sources(generator)
    for draw in draws.values():
        draw()  # half of a pair of normal numbers is kept for the next draw
    content = capture(ENGINE, {"sampling": generator})
    expected = {name: draw() for name, draw in draws.items()}
    elsewhere = {name: draw() for name, draw in draws.items()}
    assert all(elsewhere[name] != expected[name] for name in draws)
    for seed in (random.seed, np.random.seed, torch.manual_seed, generator.manual_seed):
        seed(99)
    assert restore(content, ENGINE, {"sampling": generator}) is None
    # In another order, too: no source may lean on another.
    assert {name: draws[name]() for name in reversed(draws)} == expected
    assert restore(content, ENGINE, {"sampling": generator}) is None
    assert {name: draw() for name, draw in draws.items()} == expected
    refused(content, generator)


def refused(content: bytes, generator: torch.Generator) -> None:
    before = capture(ENGINE, {"sampling": generator})
    others = {"sampling": generator, "more": generator}
    assert "generator.more" in str(restore(content, ENGINE, others))
    assert "generator.sampling" in str(restore(content, ENGINE, {}))
    get_cuda_rng_tracker().add("third", 13)
    assert "megatron.third" in str(restore(content, ENGINE, {"sampling": generator}))
    del get_cuda_rng_tracker().states_["third"]
    middle = len(content) // 2
    for damaged in (b"", content[:-1], content[:middle] + b"\xff\x00" + content[middle + 2 :]):
        with pytest.raises(CheckpointError, match="is corrupt: its digest does not match"):
            restore(damaged, ENGINE, {"sampling": generator})
    assert capture(ENGINE, {"sampling": generator}) == before, "a refusal has changed something"


@pytest.mark.nightly
def test_every_source_of_random_numbers_goes_on_where_it_was_captured(ranks) -> None:
    ranks.run(1, go_on)
