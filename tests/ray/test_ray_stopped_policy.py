"""The driver's policy when a worker is stopped, by whatever verb the driver waits for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_policy import Policy
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import WorkerError
from tests.ray.actors import LONG_S, promptly, still_running, wait_until_stopped
from tests.ray.losses import Slow, Troubled
from tests.ray.policies import DP2, FSDP2, TP2, PolicyMaker, batch

LIMIT_S = 3.0


VERBS: dict[str, Callable[[Policy, Path], Any]] = {
    "train": lambda policy, path: policy.train(batch(), Slow(0)),
    "get_logprobs": lambda policy, path: policy.get_logprobs(batch()),
    "prepare_refit_info": lambda policy, path: policy.prepare_refit_info(),
    "save_checkpoint": lambda policy, path: policy.save_checkpoint(path / "w", path / "o"),
}
LAYOUTS = {"tp2": TP2, "dp2": DP2, "fsdp2": FSDP2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("verb", "layout"),
    [
        # Whichever verb and layout, the driver watches its workers in one place.
        *(("train", layout) for layout in LAYOUTS),
        ("get_logprobs", "dp2"),
        ("prepare_refit_info", "tp2"),
        ("save_checkpoint", "fsdp2"),
    ],
)
def test_every_verb_ends_where_a_worker_is_stopped_and_names_it(
    make_policy: PolicyMaker, tmp_path: Path, verb: str, layout: str
) -> None:
    policy = make_policy(LAYOUTS[layout], worker_timeout_s=LIMIT_S)
    if verb == "train":  # after a step that takes longer than a worker may be stopped
        assert policy.train(batch(), Slow(LONG_S))["grad_norm"].isfinite().all()
    pids = policy.worker_group.pids
    os.kill(pids[1], signal.SIGSTOP)
    wait_until_stopped(pids[1])
    with (
        promptly(),
        pytest.raises(WorkerError, match=f"{verb}: rank 1 has stopped") as caught,
    ):
        VERBS[verb](policy, tmp_path)
    assert caught.value.rank == 1
    assert policy.shutdown()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.nightly
def test_futures_of_init_collective_end_where_a_worker_is_stopped_and_name_it(
    make_policy: PolicyMaker,
) -> None:
    policy = make_policy(TP2, worker_timeout_s=LIMIT_S)
    os.kill(policy.worker_group.pids[0], signal.SIGSTOP)
    wait_until_stopped(policy.worker_group.pids[0])
    with reserved_port() as port:
        refs = policy.init_collective("127.0.0.1", port, 2)
        with promptly(), pytest.raises(ray.exceptions.RayActorError, match=r"-\w+ rank 0"):
            ray.get(refs)
    with pytest.raises(WorkerError, match=r"is broken.*init_collective: rank 0 has stopped"):
        policy.get_logprobs(batch())
    assert policy.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_a_worker_stopped_inside_its_step_is_named_and_gone(
    make_policy: PolicyMaker, tmp_path: Path, layout: str
) -> None:
    policy = make_policy(LAYOUTS[layout], worker_timeout_s=LIMIT_S)
    with promptly(), pytest.raises(WorkerError, match="train: rank 1 has stopped"):
        policy.train(batch(), Troubled(tmp_path, stop_on=1))
    assert policy.shutdown()
    assert not still_running(tmp_path, within_s=0)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_collectives_of_rays_workers_end_after_the_configured_time(
    make_policy: PolicyMaker, layout: str
) -> None:
    policy = make_policy(LAYOUTS[layout], collective_timeout_s=4.0, worker_timeout_s=600.0)
    with pytest.raises(
        WorkerError, match=r"train: rank \d raised .*(4000ms|[Tt]imed out|timeout)"
    ) as caught:
        policy.train(batch(), Slow(LONG_S, only_on=1))
    assert caught.value.rank == 0
    assert policy.shutdown()
