"""verl's actor worker sends its weights by this package's checkpoint engine to a rollout's process,
in the calls of verl's manager.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.errors import ConfigError
from tests.hosts.real.verl.actor import made_worker, update
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import rollouts
from tests.hosts.real.verl.worker import in_its_own_job, mine
from tests.hosts.verl import rollout
from tests.other_process import OtherProcess
from tests.refit_engine import bits

BACKEND = "actor_rollout_ref.rollout.checkpoint_engine"
SETTINGS = {
    f"{BACKEND}.backend": "megatron_policy",
    f"{BACKEND}.custom_backend_module": "megatron_policy.hosts.verl.checkpoint_engine",
    f"{BACKEND}.update_weights_bucket_megabytes": 1,
    f"{BACKEND}.engine_kwargs": {"megatron_policy": {"timeout_s": 100.0}},
}


@pytest.fixture(scope="module")
def process() -> Iterator[OtherProcess]:
    made = OtherProcess()
    yield made
    made.kill()


def take_places(worker: Any, folder: str, number: int) -> None:
    """What verl's manager has all processes do before an update."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, worker.execute_checkpoint_engine("prepare"))
    kind = type(worker.checkpoint_engine)
    own, others = kind.build_topology(len(said), 1, [*said, None])
    worker.execute_checkpoint_engine(
        "init_process_group", **{key: each[dist.get_rank()] for key, each in own.items()}
    )
    if dist.get_rank() == 0:
        file = Path(folder) / f"{number}.part"
        file.write_bytes(pickle.dumps({key: each[0] for key, each in others.items()}))
        file.rename(file.with_suffix(""))


@in_its_own_job
def send_twice(case: Case, model: Path, folder: str) -> list[Any]:
    """Send, train, and send again: what was exported each time."""
    worker = made_worker(case, model, "actor_rollout")
    exported = []
    for number in (0, 1):
        take_places(worker, folder, number)
        speed = asyncio.run(worker.update_weights(global_steps=number))
        assert all(name.startswith("checkpoint_engine/") for name in speed)
        worker.execute_checkpoint_engine("finalize")
        weights, _ = worker.actor.engine.get_per_tensor_param()
        exported.append(bits({name: each.clone() for name, each in weights}))
        rows = rollouts(number, "v1", temperature=0.7)
        rows["old_log_probs"] = rows["advantages"].clone()
        rows["ref_log_prob"] = rows["advantages"].clone()
        update(worker, mine(worker.actor, rows))
    with pytest.raises(ConfigError, match="not a generator"):
        asyncio.run(worker.checkpoint_engine.send_weights(each for each in ()))
    worker.checkpoint_engine._leave()
    return exported


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2"])
def test_a_rollout_gets_the_actors_weights_bit_for_bit(
    verl_ranks: Any, process: OtherProcess, qwen2: Path, tmp_path: Path, layout: str
) -> None:
    process.call(rollout.start_with, {"timeout_s": 100.0})
    case = Case(layout=layout, overrides=SETTINGS)
    process.begin(rollout.updates_at, [str(tmp_path / str(number)) for number in (0, 1)])
    exported = verl_ranks.run(case.world, send_twice, case, qwen2, str(tmp_path))
    received = process.result()
    assert received[0] != received[1]
    assert exported == [received] * case.world
