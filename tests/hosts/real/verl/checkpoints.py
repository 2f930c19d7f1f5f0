"""Saving and going on by verl's training worker, and its transport of weights, on ranks."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import verl

from megatron_policy.errors import CheckpointError, ConfigError
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.worker import (
    Record,
    exported,
    in_its_own_job,
    made_worker,
    trained_steps,
)

BUCKET_MB = 1


def _under(prefix: str, record: Record) -> Record:
    return {f"{prefix}/{name}": value for name, value in record.items()}


@in_its_own_job
def save_train_load(case: Case, model: Path, folder: str, most: int | None) -> Record:
    """Two steps, a save, a third step; then the save is loaded, and the third step taken again. All
    weights and metrics, before and again. A second save has the third step. What cannot be is
    refused.
    """
    worker = made_worker(case, model)
    trained_steps(worker, range(2))
    first, second = (os.path.join(folder, f"global_step_{step}") for step in (2, 3))
    worker.save_checkpoint(first, global_step=2, max_ckpt_to_keep=most)
    record = _under("saved", exported(worker.engine))
    record |= _under("went on", trained_steps(worker, range(2, 3)) | exported(worker.engine))
    worker.load_checkpoint(first)
    record |= _under("loaded", exported(worker.engine))
    record |= _under("again", trained_steps(worker, range(2, 3)) | exported(worker.engine))
    worker.save_checkpoint(second, global_step=3, max_ckpt_to_keep=most)
    worker.load_checkpoint(None)
    with pytest.raises(CheckpointError, match="has no folder 'weights'"):
        worker.load_checkpoint(os.path.join(folder, "global_step_1"))
    with pytest.raises(ConfigError, match=r"trainer\.default_hdfs_dir"):
        worker.save_checkpoint(os.path.join(folder, "global_step_9"), "hdfs://x", 9)
    return record


@in_its_own_job
def load_and_train(case: Case, model: Path, folder: str) -> Record:
    """What a new job has after it has loaded that folder, and after a third step."""
    worker = made_worker(case, model)
    worker.load_checkpoint(folder)
    record = _under("loaded", exported(worker.engine))
    return record | _under("again", trained_steps(worker, range(2, 3)) | exported(worker.engine))


def transport() -> ModuleType:
    """verl's transport of weights to vLLM, from its file: its package imports vLLM."""
    assert verl.__file__ is not None
    rollout = Path(verl.__file__).parent / "workers/rollout"
    file = rollout / "vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@in_its_own_job
def send_or_receive(case: Case, model: Path, sockets: str) -> tuple[Record, int]:
    """The first ranks train two steps and send their weights, each to an engine of its own: a rank
    of the second half, which returns what it received, and in how many buckets.
    """
    rank, world = int(os.environ["RANK"]), case.world
    handle = f"ipc://{sockets}/{rank % world}.sock"
    if rank >= world:
        return _received(handle)
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    worker = made_worker(case, model)
    trained_steps(worker, range(2))
    weights, _ = worker.engine.get_per_tensor_param()
    sender = transport().BucketedWeightSender(handle, bucket_size_mb=BUCKET_MB, use_shm=True)
    asyncio.run(sender.async_send_weights(weights))
    dist.barrier()
    return exported(worker.engine), 0


def _received(handle: str) -> tuple[Record, int]:
    found: dict[str, np.ndarray] = {}
    buckets = 0

    def keep(weights: list[tuple[str, torch.Tensor]], *_: Any) -> None:
        nonlocal buckets
        buckets += 1
        found.update({f"weights/{name}": each.float().numpy().copy() for name, each in weights})

    receiver = transport().BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    receiver.receive_weights(keep)
    return found, buckets
