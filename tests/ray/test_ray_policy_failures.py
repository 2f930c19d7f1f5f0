"""The driver's policy when something cannot work, goes wrong in a worker, or a worker dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_policy import Policy
from megatron_policy.errors import ConfigError, ConversionError, WorkerError
from megatron_policy.workers import RayVirtualCluster
from tests.dist.cases import policy_config
from tests.ray.actors import still_running
from tests.ray.losses import Troubled
from tests.ray.policies import FSDP2, TOKENIZER, TP2, VOCAB, PolicyMaker, batch


@pytest.mark.parametrize(
    ("layout", "top", "message"),
    [
        ({"tensor_model_parallel_size": 3}, {}, "tensor_model_parallel_size"),
        ({"enabled": False}, {}, "megatron_cfg.enabled"),
        ({}, {"dtensor_cfg": {"enabled": True}}, "dtensor_cfg.enabled"),
        ({"sequence_parallel": True}, {}, "sequence_parallel"),
        ({"transformer_impl": "transformer_engine"}, {}, "use_gpus=False; use 'auto' or 'local'"),
        ({"env_vars": {"RANK": "3"}}, {}, "env_vars sets RANK"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(
    checkpoint: Callable[..., Path], layout: dict[str, Any], top: dict[str, Any], message: str
) -> None:
    cluster = RayVirtualCluster([2], use_gpus=False)
    actors = running_actors()
    with pytest.raises(ConfigError, match=message):
        Policy(cluster, policy_config(checkpoint("qwen2"), layout, **top), TOKENIZER)
    assert running_actors() == actors
    cluster.shutdown()


def running_actors() -> int:
    return len(ray.util.list_named_actors(all_namespaces=True))


@pytest.mark.nightly
def test_a_checkpoint_that_lacks_a_tensor_is_reported_by_the_constructor(
    make_policy: PolicyMaker, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    whole = checkpoint("qwen2", vocab=VOCAB)
    for file in whole.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(whole / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    actors = running_actors()
    with pytest.raises(ConversionError, match=r"model\.norm\.weight") as caught:
        make_policy(TP2, tmp_path)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert running_actors() == actors


@pytest.mark.parametrize("layout", [pytest.param(TP2, id="tp2"), pytest.param(FSDP2, id="fsdp2")])
def test_a_worker_killed_during_train_is_reported_and_shutdown_returns(
    make_policy: PolicyMaker, tmp_path: Path, layout: dict[str, Any]
) -> None:
    policy = make_policy(layout)
    killed: list[float] = []
    victim = policy.worker_group.pids[1]
    killer = threading.Thread(target=kill_when_busy, args=(victim, tmp_path, killed))
    killer.start()
    with pytest.raises(WorkerError, match="train: rank 1 died") as caught:
        policy.train(batch(), Troubled(tmp_path))
    assert caught.value.rank == 1
    killer.join()
    with pytest.raises(WorkerError, match=r"is broken.*train: rank 1 died"):
        policy.get_logprobs(batch())
    assert policy.shutdown()
    assert time.monotonic() - killed[0] < 120, "no measurement: nobody waits without end"
    assert not still_running(tmp_path, within_s=0)


def kill_when_busy(pid: int, marks: Path, killed: list[float]) -> None:
    """Wait until both ranks are inside the loss function; note when the one is killed."""
    while len(list(marks.iterdir())) < 2:
        time.sleep(0.05)
    killed.append(time.monotonic())
    os.kill(pid, signal.SIGKILL)
