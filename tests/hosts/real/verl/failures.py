"""What fails within verl's training worker on ranks, and what the worker does afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import jagged, rollouts, sft_rows
from tests.hosts.real.verl.worker import (
    Record,
    exported,
    in_its_own_job,
    made_worker,
    metrics_of,
    mine,
    trained_steps,
)

MESSAGE = "a fault of the tests"


def _raises(*_: Any, on: int, **keywords: Any) -> Any:
    if dist.get_rank() == on:
        raise ValueError(MESSAGE)
    return sft_loss(None, **keywords)


def _not_a_number(*_: Any, on: int, **keywords: Any) -> Any:
    loss, metrics = sft_loss(None, **keywords)
    return (loss * float("nan") if dist.get_rank() == on else loss), metrics


LOSSES: dict[str, Callable[..., Any]] = {"raises": _raises, "nan": _not_a_number}


def _raised(call: Callable[..., Any], *arguments: Any) -> str:
    """How a call ends: the name of what it raises, with its message and that of its cause."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error} ({error.__cause__})"
    return "nothing was raised"


@in_its_own_job
def fail_and_go_on(case: Case, model: Path, kind: str, on: int) -> tuple[list[str], Record]:
    """A step whose loss fails on one rank: what every rank raises. Then three sound steps."""
    worker = made_worker(case, model, partial(LOSSES[kind], on=on))
    said: list[str] = [""] * dist.get_world_size()
    data = mine(worker, sft_rows(0))
    dist.all_gather_object(said, _raised(worker.train_batch, data))
    worker.set_loss_fn(partial(sft_loss, config=None))
    return said, trained_steps(worker, range(3)) | exported(worker.engine)


@in_its_own_job
def train_around_nothing(case: Case, model: Path) -> tuple[Record, Record]:
    """Steps of SFT, after the first of them one on rows without a token that counts: what that
    reports, and the record of the others.
    """
    worker = made_worker(case, model)
    record = trained_steps(worker, range(1))
    rows = sft_rows(0)
    lengths = rows["input_ids"].offsets().diff().tolist()
    rows["loss_mask"] = jagged([torch.zeros(length, dtype=torch.long) for length in lengths])
    data = mine(worker, rows)
    tu.assign_non_tensor(data, update_lr_scheduler=True)
    metrics = metrics_of(worker.engine, worker.train_batch(data))
    nothing = {name: np.array(float(metrics[name])) for name in record}
    after = trained_steps(worker, range(1, 3))
    record = {name: np.concatenate([first, after[name]]) for name, first in record.items()}
    return nothing, record | exported(worker.engine)


@in_its_own_job
def refuse(case: Case, model: Path) -> list[str]:
    """What each rank raises when the worker is made."""
    said: list[str] = [""] * case.world
    raised = _raised(made_worker, case, model)
    if not dist.is_initialized():
        return [raised]
    dist.all_gather_object(said, raised)
    return said


@in_its_own_job
def refuse_data(case: Case, model: Path, key: str) -> list[str]:
    """What each rank raises for rows that ask for what no engine of ours computes."""
    worker = made_worker(case, model)
    data = mine(worker, rollouts(0, "v1", temperature=1.0))
    tu.assign_non_tensor(data, compute_loss=False, **{key: True})
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, _raised(worker.infer_batch, data))
    return said
