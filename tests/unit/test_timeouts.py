"""Timeouts that callers pass: what no wait can be bounded by is refused before anything waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_policy.coordination.timeouts import checked_timeout
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.parity.compare import compare
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.training.checks import check_sizes
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster
from tests.pure.test_config import minimal

NO_TIMEOUTS = [float("inf"), float("nan"), 1e300, 1e-300, 0, -1.0, True, "60", None]


@pytest.mark.parametrize("timeout_s", NO_TIMEOUTS, ids=str)
def test_what_bounds_no_wait_is_refused_by_name(timeout_s: Any, tmp_path: Path) -> None:
    def load(weights: Any) -> None:
        raise AssertionError("nothing is received")

    for make in (
        lambda: RayVirtualCluster([1], use_gpus=False, timeout_s=timeout_s),
        lambda: Receiver(load, timeout_s=timeout_s),
        lambda: join_collective("127.0.0.1", 1, 1, 2, timeout_s=timeout_s),
        lambda: compare(str(tmp_path), timeout_s=timeout_s),
        *([] if timeout_s is None else [lambda: MegatronPolicy(minimal(), timeout_s=timeout_s)]),
    ):
        with pytest.raises(ConfigError, match=r"timeout_s is .*: give seconds between 0\.001 and"):
            make()


def test_a_tolerance_by_which_nothing_can_be_told_is_refused(tmp_path: Path) -> None:
    for tolerance in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match=r"tolerance is .*: give a finite number"):
            compare(str(tmp_path), tolerance=tolerance)
    assert [checked_timeout(each) for each in (0.05, 1, 86400, 1e6)] == [0.05, 1, 86400, 1e6]


def test_batch_sizes_that_count_no_rows_are_refused_by_name() -> None:
    check_sizes(1, 1)
    for size in (True, 2.0, 0, -1, float("nan"), "8"):
        for name, sizes in (("gbs", (size, 1)), ("mbs", (8, size))):
            with pytest.raises(BatchError, match=f"{name} is .*: pass a whole number, 1 or more"):
                check_sizes(*sizes)
