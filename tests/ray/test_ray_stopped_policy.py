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


def train(policy: Policy, path: Path) -> Any:
    return policy.train(batch(), Slow(0))


def get_logprobs(policy: Policy, path: Path) -> Any:
    return policy.get_logprobs(batch())


def save_checkpoint(policy: Policy, path: Path) -> Any:
    policy.save_checkpoint(path / "weights", path / "optimizer")


def prepare_refit_info(policy: Policy, path: Path) -> Any:
    return policy.prepare_refit_info()


EVERY_VERB = pytest.mark.parametrize(
    ("verb", "layout"),
    [
        # Whichever verb and layout, the driver watches its workers in one place.
        pytest.param(train, TP2, id="train-tp2"),
        pytest.param(get_logprobs, DP2, id="get_logprobs-dp2"),
        pytest.param(prepare_refit_info, TP2, id="prepare_refit_info-tp2"),
        pytest.param(save_checkpoint, DP2, id="save_checkpoint-dp2"),
        pytest.param(train, DP2, id="train-dp2"),
        pytest.param(get_logprobs, TP2, id="get_logprobs-tp2"),
        pytest.param(save_checkpoint, TP2, id="save_checkpoint-tp2"),
        pytest.param(prepare_refit_info, DP2, id="prepare_refit_info-dp2"),
        *(
            pytest.param(verb, FSDP2, id=f"{verb.__name__}-fsdp2")
            for verb in (train, get_logprobs, save_checkpoint, prepare_refit_info)
        ),
    ],
)


@pytest.mark.nightly
@EVERY_VERB
def test_every_verb_ends_where_a_worker_is_stopped_and_names_it(
    make_policy: PolicyMaker,
    tmp_path: Path,
    layout: dict[str, Any],
    verb: Callable[[Policy, Path], Any],
) -> None:
    policy = make_policy(layout, worker_timeout_s=LIMIT_S)
    if verb is train:  # after a step that takes longer than a worker can be stopped, here on TP2
        assert policy.train(batch(), Slow(LONG_S))["grad_norm"].isfinite().all()
    pids = policy.worker_group.pids
    os.kill(pids[1], signal.SIGSTOP)
    wait_until_stopped(pids[1])
    with (
        promptly(),
        pytest.raises(WorkerError, match=rf"{verb.__name__}: rank 1 has stopped") as caught,
    ):
        verb(policy, tmp_path)
    assert caught.value.rank == 1
    assert policy.shutdown()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp2", "dp2"])
def test_futures_of_init_collective_end_where_a_worker_is_stopped_and_name_it(
    make_policy: PolicyMaker, layout: dict[str, Any]
) -> None:
    policy = make_policy(layout, worker_timeout_s=LIMIT_S)
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
@pytest.mark.parametrize("layout", [pytest.param(FSDP2, id="fsdp2"), pytest.param(TP2, id="tp2")])
def test_a_worker_stopped_inside_its_step_is_named_and_gone(
    make_policy: PolicyMaker, tmp_path: Path, layout: dict[str, Any]
) -> None:
    policy = make_policy(layout, worker_timeout_s=LIMIT_S)
    with promptly(), pytest.raises(WorkerError, match="train: rank 1 has stopped"):
        policy.train(batch(), Troubled(tmp_path, stop_on=1))
    assert policy.shutdown()
    assert not still_running(tmp_path, within_s=0)


@pytest.mark.nightly
def test_a_step_that_takes_longer_than_a_worker_may_be_stopped_is_taken(
    make_policy: PolicyMaker,
) -> None:
    policy = make_policy(DP2, worker_timeout_s=LIMIT_S)
    assert policy.train(batch(), Slow(LONG_S))["grad_norm"].isfinite().all()
    assert policy.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [pytest.param(TP2, id="tp2"), pytest.param(FSDP2, id="fsdp2")])
def test_collectives_of_rays_workers_end_after_the_configured_time(
    make_policy: PolicyMaker, layout: dict[str, Any]
) -> None:
    policy = make_policy(layout, collective_timeout_s=4.0, worker_timeout_s=600.0)
    with pytest.raises(
        WorkerError, match=r"train: rank \d raised .*(4000ms|[Tt]imed out|timeout)"
    ) as caught:
        policy.train(batch(), Slow(LONG_S, only_on=1))
    assert caught.value.rank == 0
    assert policy.shutdown()
