"""Chains of a thousand deltas, of every family and in every kind of layout: an engine that takes
each of them and one that takes many at once have what a whole export has, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron_policy.refit.transports.deltas import DeltaDirectory
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.test_delta_refit import Follower, chain_in, disturb
from tests.dist.test_detached_refit import PEFT, SIZES, bits_of
from tests.families import SAMPLES
from tests.ranks import RankPool
from tests.refit_engine import bits

LINKS = 1000
COMPARED = 10  # every so many links are compared with an export
WHOLE_EVERY = 300  # of families; in layouts there is no whole version but the first
ODD = SIZES | {"vocab": 251}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "tp2": ("qwen2", "tp2", SIZES, {}),
    "odd vocabulary": ("qwen2", "tp2", ODD | {"tied": True}, {}),
    "pp2": ("qwen2", "pp2", ODD, {}),
    "cp2": ("qwen2", "cp2", ODD, {}),
    "ep2": ("qwen3_moe", "ep2", ODD, {}),
    "fsdp2": ("qwen2", "fsdp2", ODD, {}),
    "merged adapters": ("qwen2", "tp2", ODD, PEFT),
    **{family: (family, "one", {}, {}) for family in SAMPLES},
}
"""A family, a layout, and what its checkpoint and its section have besides."""


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder that costs no disk."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def share_of(link: int) -> float:
    """How many of the elements change: few, none now and then, and seldom nearly all."""
    return 0.9 if link % 97 == 50 else 0.0 if link % 13 == 5 else (0.02, 0.002)[link % 2]


def follow(config: dict[str, Any], root: Path, links: int, whole_every: int) -> None:
    """A chain, of which one engine takes every link, and one those since a whole version."""
    with open_policy(config, **UNUSED) as policy:
        forms, to = policy.exporter.plan().info(), DeltaDirectory(root, whole_every=whole_every)
        each, late, seen = Follower(forms, root), Follower(forms, root), set[int]()
        for link in range(links + 1):
            disturb(policy, link, share_of(link))
            policy.refit(to)
            if policy.rank == 0:
                each.receive()
            if link % COMPARED == 0:
                now = bits_of(policy)
                assert policy.rank > 0 or bits(each.engine.weights) == now, f"link {link}"
                seen.add(hash(frozenset((name, content) for name, (*_, content) in now.items())))
        if policy.rank == 0:
            assert late.receive() == now and len(late.engine.loads) == 1
            assert chain_in(root).newest.number == links
        assert len(seen) == links // COMPARED + 1


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_thousand_deltas_equal_whole_exports(
    ranks: RankPool, checkpoint: Any, in_memory: Path, case: str
) -> None:
    family, layout, sizes, section = CASES[case]
    world, own = LAYOUTS[layout]
    config = policy_config(checkpoint(family, **sizes), own | section)
    every = WHOLE_EVERY if layout == "one" else LINKS + 1
    ranks.run(world, follow, config, in_memory / "chain", LINKS, every)
