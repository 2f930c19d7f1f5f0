"""verl's `ActorRolloutRefWorker` in a rank process, as actor, as reference and as both, with verl's
own PPO loss: the calls of its PPO trainer, whose rollouts are made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import base

from tests.hosts.real.verl.configs import Case, ppo_config
from tests.hosts.real.verl.rollouts import LENGTHS, add_responses, rollouts
from tests.hosts.real.verl.worker import (
    Record,
    exported,
    in_its_own_job,
    metrics_of,
    mine,
    of_responses,
    rollouts_at,
    text_of,
)

UPDATES, MINI_BATCH, EPOCHS = 3, 4, 2
"""Rollouts of 8 rows, their mini-batches, and the passes over them: 12 steps."""
TRAINED = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss")


class Receiver(base.BaseRollout):
    """In the place of an inference engine: it keeps the weights that verl hands it."""

    received: dict[str, torch.Tensor]

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *_: Any, **__: Any
    ) -> None:
        self.received = {name: weight.detach().clone() for name, weight in weights}


def made_worker(case: Case, model: Path, role: str) -> ActorRolloutRefWorker:
    """A worker as the PPO trainer makes it, initialised."""
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{Receiver.__name__}"
    config = ppo_config(case, model).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, role=role)
    worker.init_model()
    return worker


def old_log_probs(worker: ActorRolloutRefWorker, data: TensorDict) -> TensorDict | None:
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    return worker.compute_log_prob(data)


def reference_log_probs(worker: ActorRolloutRefWorker, data: TensorDict) -> TensorDict | None:
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    return worker.compute_ref_log_prob(data)


def update(worker: ActorRolloutRefWorker, data: TensorDict) -> TensorDict | None:
    tu.assign_non_tensor(
        data,
        calculate_entropy=True,
        compute_loss=True,
        global_batch_size=MINI_BATCH,
        mini_batch_size=MINI_BATCH,
        epochs=EPOCHS,
        seed=42,
        dataloader_kwargs={"shuffle": False},
    )
    return worker.update_actor(data)


@in_its_own_job
def read_alone(case: Case, model: Path, role: str) -> Record:
    """Log-probabilities of an actor, or of a reference, that is alone in its process."""
    worker = made_worker(case, model, role)
    part, read = (
        (worker.actor, old_log_probs) if role == "actor" else (worker.ref, reference_log_probs)
    )
    output = read(worker, mine(part, rollouts(0, "v1", temperature=0.7)))
    return {"log_probs": of_responses(text_of(part.engine, output, "log_probs"))}


@in_its_own_job
def train_ppo(case: Case, model: Path, layout: str, temperature: float | None = 0.7) -> Record:
    """Three updates of a GRPO run with a KL term and an entropy bonus, actor and reference in one
    process. Without a `temperature`, each row has its own.
    """
    worker = made_worker(case, model, "actor_rollout_ref")
    engine = worker.actor.engine
    record: Record = {}
    columns: dict[str, list[float]] = {name: [] for name in TRAINED}
    for number in range(UPDATES):
        rows = rollouts_at(temperature, number, layout)
        old = old_log_probs(worker, mine(worker.actor, rows))
        read = {key: text_of(engine, old, key) for key in ("log_probs", "entropy")}
        ref = reference_log_probs(worker, mine(worker.ref, rows))
        read["ref_log_prob"] = text_of(worker.ref.engine, ref, "log_probs")
        record |= {f"{number}/{key}": of_responses(text) for key, text in read.items()}
        add_responses(rows, "old_log_probs", read["log_probs"])
        add_responses(rows, "ref_log_prob", read["ref_log_prob"])
        metrics = metrics_of(engine, update(worker, mine(worker.actor, rows)))
        for name, column in columns.items():
            column += _of_steps(metrics[name])
    ref = reference_log_probs(worker, mine(worker.ref, rollouts_at(temperature, 0, layout)))
    record["end/ref_log_prob"] = of_responses(text_of(worker.ref.engine, ref, "log_probs"))
    record |= {name: np.array(column) for name, column in columns.items()}
    record |= exported(engine)
    asyncio.run(worker.update_weights(global_steps=UPDATES, mode="naive"))
    received = worker.rollout.received
    return record | {f"received/{name}": each.float().numpy() for name, each in received.items()}


def _of_steps(values: list[Any]) -> list[float]:
    """A metric of twelve steps, four to an update."""
    assert len(values) == len(LENGTHS) // MINI_BATCH * EPOCHS, values
    return [float(value) for value in values]
