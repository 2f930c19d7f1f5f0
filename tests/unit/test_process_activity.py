"""What counts as a sign that a worker's process was not stopped, and whose processes are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_policy.workers.cluster.processes import CpuReading, read_processes

# A process that Ray could have started, by its name.
WORKER = """
import pathlib, time
pathlib.Path("/proc/self/comm").write_text("ray::a worker")
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def worker() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def reading_of(pid: int) -> CpuReading:
    return read_processes([pid])[pid]


def test_a_process_that_is_stopped_shows_no_beat_and_one_that_goes_on_does(worker: int) -> None:
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: reading_of(worker).halted)
    held = reading_of(worker)
    time.sleep(0.5)
    assert not reading_of(worker).follows(held)
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: reading_of(worker).follows(held) and not reading_of(worker).halted)


def test_a_process_that_waits_for_its_machine_counts_as_running() -> None:
    earlier = CpuReading(ran_ns=5, wants=False, halted=False)
    assert not CpuReading(ran_ns=5, wants=False, halted=False).follows(earlier)
    assert CpuReading(ran_ns=5, wants=True, halted=False).follows(earlier)
    assert CpuReading(ran_ns=6, wants=False, halted=False).follows(earlier)


def test_processes_that_are_none_of_rays_are_not_read(worker: int) -> None:
    assert read_processes([os.getpid(), worker, 2**22 + 1]).keys() == {worker}


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
