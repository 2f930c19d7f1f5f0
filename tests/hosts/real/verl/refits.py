"""verl's actors that hand weights to a rollout in another process, by our own checkpoint engine, as
verl calls both ends: they meet, they update, they finish.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.utils.losses import sft_loss

from tests.hosts.real.verl.actor import made_worker
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.worker import Record, exported, in_its_own_job, trained_steps

NAME, MODULE, MEGABYTES = "megatron_policy", "megatron_policy.hosts.verl.checkpoint_engine", 1
SECTION = "actor_rollout_ref.rollout.checkpoint_engine"
SETTINGS: Mapping[str, Any] = {
    f"{SECTION}.backend": NAME,
    f"{SECTION}.custom_backend_module": MODULE,
    f"{SECTION}.update_weights_bucket_megabytes": MEGABYTES,
}
"""What users set."""
Outcome = Record | str
"""The weights of an update, or what it raised."""


@in_its_own_job
def send_or_receive(
    case: Case, model: Path, meeting: str, takes: list[int | None]
) -> list[Outcome]:
    """The first ranks are actors, which train a step before each update. The last one is a rollout,
    which takes as many weights as `takes` says at each update, or all.
    """
    rank = int(os.environ["RANK"])
    store = dist.FileStore(meeting, case.world + 1)
    if rank == case.world:
        return _rollout(store, takes)
    os.environ |= {"WORLD_SIZE": str(case.world), "LOCAL_WORLD_SIZE": str(case.world)}
    worker = made_worker(replace(case, overrides=SETTINGS), model, "actor_rollout")
    worker.set_loss_fn(partial(sft_loss, config=None))
    engine, found = worker.checkpoint_engine, list[Outcome]()
    for number in range(len(takes)):
        trained_steps(worker.actor, range(number, number + 1))
        said = engine.prepare()
        if rank == 0:
            metadata = [said, *[None] * case.world]
            store.set(f"{number}", pickle.dumps(engine.build_topology(case.world, 1, metadata)))
        trainers, _ = pickle.loads(store.get(f"{number}"))
        engine.init_process_group(**{name: each[rank] for name, each in trainers.items()})
        try:
            speed = asyncio.run(worker.update_weights(global_steps=number))
            assert all(name.startswith("checkpoint_engine/") for name in speed)
            found.append(exported(worker.actor.engine))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        engine.finalize()
    return found


def _rollout(store: dist.Store, takes: list[int | None]) -> list[Outcome]:
    import_module(MODULE)
    engine, found = CheckpointEngineRegistry.new(NAME, MEGABYTES << 20), list[Outcome]()
    for number, take in enumerate(takes):
        engine.prepare()
        _, rollouts = pickle.loads(store.get(f"{number}"))
        engine.init_process_group(**{name: each[0] for name, each in rollouts.items()})
        try:
            found.append(asyncio.run(_taken(engine, number, take)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        engine.finalize()
    return found


async def _taken(engine: Any, number: int, take: int | None) -> Record:
    found: Record = {}
    stream = engine.receive_weights(global_steps=number)
    async for name, weight in stream:
        found[f"weights/{name}"] = weight.float().numpy().copy()
        if len(found) == take:
            await stream.aclose()
            break
    return found
