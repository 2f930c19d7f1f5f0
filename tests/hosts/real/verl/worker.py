"""verl's `TrainingWorker` in a rank process, with verl's own losses: what its trainers do with it,
and what came of it as plain arrays.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

from tests.hosts.real.verl.configs import Case, sft_config
from tests.hosts.real.verl.rollouts import LENGTHS, jagged, part_of, rollouts, sft_rows

Record = dict[str, np.ndarray]
"""Named arrays: one number a step, what was read of all rows, weights."""
TOTAL_STEPS = 100
TEMPERATURES = torch.linspace(0.6, 1.3, len(LENGTHS))
"""One for each row."""


Driver = TypeVar("Driver", bound=Callable[..., Any])


def in_its_own_job(driver: Driver) -> Driver:
    """What a driver leaves in its process ends with it: roles are those of a process."""

    @functools.wraps(driver)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return driver(*args, **keywords)
        finally:
            ours = sys.modules.get("megatron_policy.hosts.verl.config")
            for engine in ours.ENGINES.values() if ours else ():
                engine.stage.leave()

    return run  # type: ignore[return-value]


def made_worker(
    case: Case, model: Path, loss: Callable[..., Any] | None = None, kind: str = "language_model"
) -> TrainingWorker:
    """A training worker as the SFT trainer makes it, or a critic (`value_model`), initialised."""
    config = sft_config(case, model)
    parts = {
        f"{each}_config": omega_conf_to_dataclass(config[name])
        for each, name in (
            ("model", "model"),
            ("engine", "engine"),
            ("optimizer", "optim"),
            ("checkpoint", "checkpoint"),
        )
    }
    parts["optimizer_config"].total_training_steps = TOTAL_STEPS
    parts["engine_config"].infer_micro_batch_size_per_gpu = case.rows
    parts["engine_config"].infer_max_token_len_per_gpu = case.tokens
    parts["engine_config"].micro_batch_size_per_gpu = case.rows
    parts["engine_config"].max_token_len_per_gpu = case.tokens
    parts["engine_config"].use_dynamic_bsz = case.dynamic
    worker = TrainingWorker(TrainingWorkerConfig(model_type=kind, **parts))
    worker.set_loss_fn(loss or partial(sft_loss, config=None))
    worker.reset()
    return worker


def mine(worker: TrainingWorker, rows: TensorDict) -> TensorDict:
    """The rows that verl hands to this rank, with the number of tokens of all rows."""
    engine = worker.engine
    lengths = rows["input_ids"].offsets().diff().tolist()
    part = part_of(rows, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    tu.assign_non_tensor(part, global_token_num=NonTensorData(lengths))
    return part


def collected(engine: Any, value: Any) -> list[Any]:
    """What the ranks have whose outputs verl collects, in the order of data-parallel ranks."""
    said: list[Any] = [None] * dist.get_world_size()
    there = engine.is_mp_src_rank_with_outputs()
    dist.all_gather_object(said, (there, engine.get_data_parallel_rank(), value if there else None))
    by_rank = {rank: held for there, rank, held in said if there}
    assert sorted(by_rank) == list(range(engine.get_data_parallel_size())), said
    return [by_rank[rank] for rank in sorted(by_rank)]


def text_of(engine: Any, output: TensorDict | None, key: str) -> torch.Tensor:
    """What was read of all rows, jagged; position t of a row has token t + 1, the last one none."""
    mine = None if output is None else [row.numpy() for row in output[key].float().unbind()]
    rows = [torch.from_numpy(row) for part in collected(engine, mine) for row in part]
    return jagged(rows)


def of_responses(text: torch.Tensor) -> np.ndarray:
    """The values of all responses, which are all that verl reads of rollouts: engines need not
    compute others.
    """
    rows = zip(text.unbind(), LENGTHS, strict=True)
    return torch.cat([row[prompt - 1 : -1] for row, (prompt, _) in rows]).numpy()


def metrics_of(engine: Any, output: TensorDict | None) -> Mapping[str, Any]:
    """The metrics of a call, of the first data-parallel rank."""
    return collected(engine, None if output is None else tu.get(output, "metrics"))[0]


def exported(engine: Any) -> Record:
    """Every weight as verl hands it to an inference engine; collective."""
    weights, adapters = engine.get_per_tensor_param()
    assert adapters is None
    return {f"weights/{name}": weight.detach().float().numpy().copy() for name, weight in weights}


def trained_steps(worker: TrainingWorker, steps: range) -> Record:
    """SFT on the rows of these steps: the metrics, a number for each."""
    columns: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": []}
    for step in steps:
        data = mine(worker, sft_rows(step))
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        metrics = metrics_of(worker.engine, worker.train_batch(data))
        for name, column in columns.items():
            column.append(float(metrics[name]))
    return {name: np.array(column) for name, column in columns.items()}


def rollouts_at(temperature: float | None, seed: int, layout: str) -> TensorDict:
    """Rollouts to be read at a temperature, or each row at its own."""
    if temperature is not None:
        return rollouts(seed, layout, temperature=temperature)
    rows = rollouts(seed, layout)
    rows["temperature"] = TEMPERATURES.clone()
    return rows


def read_rows(worker: TrainingWorker, name: str, temperature: float | None, layout: str) -> Record:
    """Log-probabilities and entropies of rollouts at a temperature, or each row at its own."""
    data = mine(worker, rollouts_at(temperature, 7, layout))
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    output = worker.infer_batch(data)
    keys = ("log_probs", "entropy")
    return {f"{name}/{key}": of_responses(text_of(worker.engine, output, key)) for key in keys}


@in_its_own_job
def train_sft(case: Case, model: Path, steps: int = 3) -> Record:
    """Steps of SFT by `train_batch`, an evaluation, and readings of rollouts in both layouts, at
    two temperatures and at one for each row.
    """
    worker = made_worker(case, model)
    record: Record = {}
    for layout, temperature in (("v0", 1.0), ("v1", 0.7), ("v1", None)):
        name = f"{len(record)}/{layout}"
        record |= read_rows(worker, name, temperature, layout)
    record |= trained_steps(worker, range(steps))
    evaluated = worker.infer_batch(mine(worker, sft_rows(steps)))
    record["evaluated/loss"] = np.array(metrics_of(worker.engine, evaluated)["loss"])
    record |= read_rows(worker, "after/v1", 0.7, "v1")
    return record | exported(worker.engine)


@in_its_own_job
def train_plain(case: Case, model: Path, steps: int = 3) -> Record:
    """Steps of SFT, and nothing else."""
    worker = made_worker(case, model)
    return trained_steps(worker, range(steps)) | exported(worker.engine)
