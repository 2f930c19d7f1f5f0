"""The table of docs/interface.md: complete on both sides, and every row is what a worker does. What
a driver has no argument for, it refuses before it sends anything, and every method says what it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_policy import GenerationInterface, MegatronPolicy, Policy
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.worker import NemoRLWorker
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.training.accumulate import GradientAccumulator
from megatron_policy.training.pieces import StepPieces
from megatron_policy.workers.records import RecordingDriver
from megatron_policy.workers.refit_driver import RefitDriver
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

PAGE = Path(__file__).resolve().parents[2] / "docs" / "interface.md"
SAME_AS = {
    "offload_to_cpu": "offload_after_refit",  # one method of the worker serves both
    "prepare_info_for_collective": "prepare_refit_info",
    "profile": "begin_profile",  # a context of the driver is two methods of the worker
}
SEEN_AS = {
    "broadcast_weights_for_collective": "self.policy.refit(self._collective.transport(",
    "get_refit_manifest": "self._handles.manifest(",
    "get_refit_secret": "self._collective.secret",
    "get_weights_ipc_handles": "IpcHandles(self.policy.exporter)",
    "init_collective": "Collective.join(",
}
"""What a worker's method uses where that is not written as in the table."""


def cells() -> list[tuple[list[str], list[str]]]:
    """The names in the first two columns of each row."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    split = [row.strip("|").split("|") for row in rows[1:]]
    return [(re.findall(r"`([^`]+)`", ours), re.findall(r"`([^`]+)`", s)) for ours, s, _ in split]


PAIRS = [(ours, theirs) for ours, names in cells() for theirs in names if ours]


def public(owner: type) -> set[str]:
    """The methods and properties of this project that a class shows."""
    return {
        name
        for name in dir(owner)
        if not name.startswith("_")
        and (inspect.isfunction(getattr(owner, name)) or isinstance(getattr(owner, name), property))
    }


def test_every_method_of_a_rank_is_in_the_table() -> None:
    named = {name for ours, _ in cells() for name in ours}
    steps = {f"accumulator.{name}" for name in public(GradientAccumulator)}
    steps |= {f"pieces.{name}" for name in public(StepPieces)}
    assert public(MegatronPolicy) | steps <= named
    plain = {name for name in named if "(" not in name and "." not in name}
    assert plain - {"loaded"} == public(MegatronPolicy)


def test_every_method_of_the_driver_is_in_the_table_once() -> None:
    named = [name for _, theirs in cells() for name in theirs]
    assert sorted(named) == sorted(public(Policy))


def test_a_driver_generates_as_algorithms_expect() -> None:
    """It is one by registration, for which Python asks no methods."""
    assert issubclass(Policy, GenerationInterface)
    assert GenerationInterface.__abstractmethods__ <= public(Policy)


def carried_out_by(method: Any) -> Any:
    """What a method calls in the end that delegates to a part, or to a part of that."""
    while function := inspect.getclosurevars(method).nonlocals.get("function"):
        method = function
    return method


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_worker_carries_out_the_drivers_method_by_the_ranks(ours: list[str], theirs: str) -> None:
    method = carried_out_by(getattr(MegatronPolicyWorkerImpl, SAME_AS.get(theirs, theirs)))
    own = [getattr(MegatronPolicy, name) for name in ours if hasattr(MegatronPolicy, name)]
    if method in [carried_out_by(each) for each in own if inspect.isfunction(each)]:
        return
    source = inspect.getsource(method)
    if theirs in SEEN_AS:
        assert SEEN_AS[theirs] in source
    else:
        begins = [name.partition("...")[0] for name in ours]
        ends = ["" if name.endswith("(") else r"(?!\w)" for name in begins]
        names = "|".join(re.escape(name) + end for name, end in zip(begins, ends, strict=True))
        assert re.search(rf"self\.policy\.({names})", source)


def test_a_rank_answers_to_the_names_of_the_driver() -> None:
    """What keeps engines, workers or a cluster is not a rank's."""
    without = {name for ours, theirs in cells() for name in theirs if not ours}
    of_engines = {"offload_to_cpu", "get_load_report", *SEEN_AS, "stream_weights_via_ipc_zmq"}
    of_engines |= {"prepare_refit_info", "prepare_info_for_collective", "prepare_weights_for_ipc"}
    assert public(Policy) - public(MegatronPolicy) == without | of_engines


@pytest.mark.parametrize("owner", [MegatronPolicy, MegatronPolicyWorkerImpl, NemoRLWorker, Policy])
def test_every_method_has_a_name_of_its_own_and_says_what_it_does(owner: type) -> None:
    for name in sorted(public(owner)):
        method = inspect.getattr_static(owner, name)
        assert inspect.getdoc(method), name
        if inspect.isfunction(method):
            assert "<locals>" not in method.__qualname__, name


class NoWorkers:
    """Nothing may be sent to them."""

    def kill(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("save_checkpoint", lambda driver: driver.save_checkpoint("weights", unheard_of=True)),
        ("init_collective", lambda driver: driver.init_collective("::1", 1, 2, unheard_of=True)),
    ],
)
def test_a_driver_refuses_what_it_has_no_argument_for_before_it_sends_anything(
    name: str, call: Callable[[Policy], Any]
) -> None:
    driver = object.__new__(Policy)
    driver._workers = workers = NoWorkers()  # type: ignore[assignment]
    driver._refits = RefitDriver(workers, MetricsLog())  # type: ignore[arg-type]
    config: Any = None
    driver._records = RecordingDriver(config, workers, MetricsLog())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} has no argument unheard_of; leave it out"):
        call(driver)
