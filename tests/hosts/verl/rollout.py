"""A rollout's process of verl: it receives weights by the checkpoint engine, as verl calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.hosts.verl.find import find_verl
from tests.refit_engine import Bits, bits

_here: list[Any] = []


def start(**options: Any) -> None:
    """Make the engine, by its name."""
    find_verl()
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    import megatron_policy.hosts.verl.checkpoint_engine  # noqa: F401

    _here[:] = [CheckpointEngineRegistry.new("megatron_policy", bucket_size=4096, **options)]
    assert _here[0].prepare() is None


def start_with(options: Mapping[str, Any]) -> None:
    start(**options)


def update(places: Mapping[str, Any], take: int | None = None) -> Bits:
    """One update: the weights that arrived, of which the loop takes all, or the first `take`."""
    engine = _here[0]
    engine.init_process_group(**places)
    try:
        return asyncio.run(_taken(engine, take))
    finally:
        engine.finalize()


async def _taken(engine: Any, take: int | None) -> Bits:
    found: Bits = {}
    stream = engine.receive_weights(global_steps=1)
    async for name, tensor in stream:
        assert name not in found
        found |= bits({name: tensor})
        if len(found) == take:
            await stream.aclose()
            break
    return found


def updates(places: Mapping[str, Any], count: int) -> list[Bits]:
    """Several, one after another."""
    return [update(places) for _ in range(count)]


def kept() -> bool:
    """Whether memory of the last update is still held."""
    return _here[0]._receiver is not None
