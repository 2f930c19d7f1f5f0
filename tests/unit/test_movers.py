"""Movers write where they are told to, refuse what does not fit, and never into memory that was
given up; NIXL's where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megatron_policy.errors import ConfigError, MissingPackageError, RefitError
from megatron_policy.refit.transports.movers.landing import Landing, LandingPlace
from megatron_policy.refit.transports.movers.mover import Mover
from megatron_policy.refit.transports.movers.named import MOVERS, find_mover
from megatron_policy.refit.transports.movers.nixl import NixlWriting
from tests.other_process import OtherProcess

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
EACH = ["shared_memory", pytest.param("nixl", marks=NEEDS_NIXL)]
SIZE = 4096


def make(name: str, nbytes: int = SIZE) -> Mover:
    return find_mover(name)(nbytes, 30.0, lambda: None)


@pytest.fixture(params=EACH)
def pair(request: Any) -> Iterator[tuple[str, Mover, Mover]]:
    """Movers of a trainer, full of ones, and of an engine, full of zeros."""
    trainer, engine = make(request.param), make(request.param)
    trainer.memory.fill_(1)
    engine.memory.zero_()
    yield request.param, trainer, engine
    trainer.close()
    engine.close()


def test_a_chunk_is_written_where_it_belongs_and_nowhere_else(pair: Any) -> None:
    _, trainer, engine = pair
    trainer.write(engine.description, trainer.memory[:100], 1000).wait()
    trainer.write(engine.description, trainer.memory[5:6], SIZE - 1).wait()
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    expected[1000:1100] = expected[-1] = 1
    assert torch.equal(engine.memory, expected)


@pytest.mark.parametrize("at", [-1, SIZE - 99, 2**63])
def test_what_does_not_fit_is_refused(pair: Any, at: int) -> None:
    _, trainer, engine = pair
    with pytest.raises(RefitError, match=r"100 bytes from .* on do not fit into the engine's"):
        trainer.write(engine.description, trainer.memory[:100], at)
    assert not engine.memory.any()


@pytest.mark.parametrize("words", [b"", b"[]", b"[1, 2, 3]", b'["", 1, 1]', b"\xff", b"[" * 10**5])
def test_words_that_describe_no_memory_are_refused(pair: Any, words: bytes) -> None:
    _, trainer, _ = pair
    with pytest.raises(RefitError, match=r"describes no shared memory|cannot reach the engine"):
        trainer.write(words, trainer.memory[:1], 0)


def test_what_is_written_to_released_memory_reaches_no_later_one(pair: Any) -> None:
    name, trainer, engine = pair
    trainer.write(engine.description, trainer.memory, 0).wait()
    to, kept = engine.description, engine.memory
    kept.zero_()
    engine.close()
    later = make(name)
    later.memory.zero_()
    if name == "shared_memory":  # it still has the old memory
        trainer.write(to, trainer.memory, 0).wait()
    else:
        with pytest.raises(RefitError, match="NIXL"):
            trainer.write(to, trainer.memory, 0).wait()
        assert not kept.any()
    assert not later.memory.any()
    later.close()


_here: list[Mover] = []


def describe(name: str) -> bytes:
    _here[:] = [make(name)]
    return _here[0].description


@pytest.mark.parametrize("name", EACH)
def test_memory_of_a_process_that_was_killed_is_not_written_to(name: str) -> None:
    process, trainer = OtherProcess(), make(name)
    to = process.call(describe, name)
    process.kill()
    with pytest.raises(RefitError, match=r"trainer cannot open shared memory|NIXL"):
        trainer.write(to, trainer.memory, 0).wait()
    trainer.close()


def test_a_landing_keeps_its_memory_while_it_suffices_and_until_it_is_closed() -> None:
    landing = Landing()
    first = landing.prepare("shared_memory", [1000, 0, 3], 1.0)
    assert first["at"] == [0, 1024, 1024]
    assert landing.prepare("shared_memory", [1536], 1.0)["to"] == first["to"]
    second = landing.prepare("shared_memory", [1537], 1.0)
    landing.close()
    third = landing.prepare("shared_memory", [1], 1.0)
    assert len({first["to"], second["to"], third["to"]}) == 3
    landing.close()


def test_a_trainer_finds_its_own_place() -> None:
    landing, trainer = Landing(), make("shared_memory")
    words = landing.prepare("shared_memory", [10, 10], 1.0)
    trainer.memory.fill_(7)
    place = LandingPlace.from_words(words, 1)
    trainer.write(place.to, trainer.memory[:10], place.at).wait()
    assert landing.part(1, 10).tolist() == [7] * 10 and not landing.part(0, 10).any()
    landing.close()
    trainer.close()
    for wrong in ({}, {"to": "?", "at": [0, 0]}, {"to": "", "at": [0]}, {"to": "", "at": [0, "a"]}):
        with pytest.raises(RefitError, match="does not say where its weights are to be written"):
            LandingPlace.from_words(wrong, 1)


def test_a_mover_that_does_not_exist_or_is_not_installed_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="mover='rdma' is none of shared_memory, nixl"):
        find_mover("rdma")
    with pytest.raises(RefitError, match="mover='rdma' is none of"):
        Landing().prepare("rdma", [1], 1.0)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        MOVERS["nixl"](1, 1.0, lambda: None)
    with pytest.raises(RefitError, match="pip install"):
        Landing().prepare("nixl", [1], 1.0)


class Stuck:
    """An agent, and a transfer of it, that does not end."""

    def check_xfer_state(self, handle: Any) -> str:
        return "PROC"


def lost() -> None:
    raise RefitError("engine 0 has left")


def test_a_wait_ends_when_the_refit_has_failed_and_after_its_time() -> None:
    with pytest.raises(RefitError, match="engine 0 has left"):
        NixlWriting(Stuck(), object(), "PROC", 600.0, lost).wait()
    with pytest.raises(RefitError, match=r"not written to within 0\.01 s"):
        NixlWriting(Stuck(), object(), "PROC", 0.01, lambda: None).wait()
    with pytest.raises(RefitError, match="its state is ERR"):
        NixlWriting(Stuck(), object(), "ERR", 1.0, lambda: None).wait()
