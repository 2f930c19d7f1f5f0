"""verl's critic in a rank process: its training worker of a value model, with its value loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.utils import tensordict_utils as tu
from verl.workers.config import CriticConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from megatron_policy.errors import ConfigError
from tests.hosts.real.verl import value_models  # noqa: F401
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import add_responses, rollouts
from tests.hosts.real.verl.worker import (
    Record,
    exported,
    in_its_own_job,
    made_worker,
    metrics_of,
    mine,
    of_responses,
    text_of,
    trained_steps,
)

UPDATES, MINI_BATCH, EPOCHS = 2, 4, 2
METRICS = ("loss", "grad_norm")


@in_its_own_job
def train_critic(case: Case, model: Path, layout: str) -> Record:
    """Two updates of a critic: values of rollouts, and eight steps."""
    return _trained(_made_critic(case, model), layout)


@in_its_own_job
def train_beside_an_actor(case: Case, model: Path, critic: Path) -> tuple[Record, Record]:
    """A critic, and SFT of an actor, in turn in one process, where verl puts them. The actor can
    begin anew there; a second one cannot be made.
    """
    actor = made_worker(case, model)
    valued = _made_critic(case, critic)
    before = trained_steps(actor, range(1))
    record = _trained(valued, "v1")
    after = trained_steps(actor, range(1, 2))
    steps = {name: np.concatenate([before[name], after[name]]) for name in before}
    steps |= exported(actor.engine)
    actor.reset()
    assert np.array_equal(trained_steps(actor, range(1))["loss"], before["loss"])
    with pytest.raises(ConfigError, match="trained in this process already"):
        made_worker(case, model)
    return record, steps


def _made_critic(case: Case, model: Path) -> TrainingWorker:
    config = CriticConfig(strategy=case.engine, ppo_micro_batch_size_per_gpu=case.rows)
    return made_worker(case, model, partial(value_loss, config=config), "value_model")


def _trained(worker: TrainingWorker, layout: str) -> Record:
    record: Record = {}
    columns: dict[str, list[float]] = {name: [] for name in METRICS}
    for number in range(UPDATES):
        rows = rollouts(number, layout, temperature=0.7)
        data = mine(worker, rows)
        tu.assign_non_tensor(data, compute_loss=False)
        values = text_of(worker.engine, worker.infer_batch(data), "values")
        record[f"{number}/values"] = of_responses(values)
        add_responses(rows, "values", values)
        metrics = _update(worker, mine(worker, rows))
        for name, column in columns.items():
            column += map(float, metrics[name])
    record |= {name: np.array(column) for name, column in columns.items()}
    return record | exported(worker.engine)


def _update(worker: TrainingWorker, data: Any) -> Any:
    tu.assign_non_tensor(
        data,
        global_batch_size=MINI_BATCH,
        mini_batch_size=MINI_BATCH,
        epochs=EPOCHS,
        seed=42,
        dataloader_kwargs={"shuffle": False},
    )
    return metrics_of(worker.engine, worker.train_mini_batch(data))
