"""Workers that are forks of the tests' server: they are what Ray would have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import RayVirtualCluster, WorkerGroup
from tests.fork_server import ADDRESS, PLAIN, START, ForkServer
from tests.ray.actors import GroupMaker, Worker

SCRIPT = """
import os, sys
print(sys.argv, os.getppid(), os.environ["A"], __name__, __file__, "torch" in sys.modules)
sys.stderr.write("to standard error")
"""


@pytest.fixture(scope="module")
def server(ray_instance: ForkServer | None) -> ForkServer:
    if ray_instance is None:
        pytest.skip("workers are not forked where there is a GPU")
    return ray_instance


def look(_worker: Any) -> dict[str, Any]:
    """Runs in a worker: what it was made of."""
    import torch

    own = {"RANK", "LOCAL_RANK", "MASTER_PORT", PLAIN, ADDRESS}
    # The shell sets these that Ray starts a worker with, and libraries that Ray's script imports.
    own |= {"_", "SHLVL", "OLDPWD", "PWD", "LINES", "COLUMNS"}
    return {
        # setuptools adds a folder of its own to the path when it is imported.
        "path": [entry for entry in sys.path if not entry.endswith("setuptools/_vendor")],
        "argv": [each for each in sys.argv if "=" not in each],
        "main": sys.modules["__main__"].__file__,
        "folder": os.getcwd(),
        "environment": {key: value for key, value in os.environ.items() if key not in own},
        "threads": torch.get_num_threads(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "signals": {each.name: handler_of(each) for each in signal.Signals},
        "limits": Path("/proc/self/limits").read_text(),
        "nice": os.nice(0),
    }


def handler_of(number: signal.Signals) -> str:
    handler = signal.getsignal(number)
    return getattr(handler, "__qualname__", str(handler))


def parent(_worker: Any) -> tuple[int, bool]:
    return os.getppid(), "megatron.core" in sys.modules


def ask(group: WorkerGroup, fn: Any) -> Any:
    return ray.get(ray.get_actor(f"{group.name} rank 0").__ray_call__.remote(fn))


@pytest.mark.nightly
def test_a_forked_worker_is_what_ray_starts_but_has_imported_everything(
    make_group: GroupMaker, server: ForkServer
) -> None:
    forked = make_group(Topology(), env_vars={"A_FLAG": "on"})
    plain = make_group(Topology(), env_vars={"A_FLAG": "on", PLAIN: "1"})
    assert ask(forked, parent) == (server.pid, True)
    raylet, imported = ask(plain, parent)
    assert raylet != server.pid and not imported
    assert ask(forked, look) == ask(plain, look)


def test_only_the_worker_that_is_killed_ends() -> None:
    cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2)
    first, second = (WorkerGroup(cluster, Worker, Topology()) for _ in range(2))
    first.kill()
    assert second.run_all("act", how={}) == ["rank 0 is fine"]
    third = WorkerGroup(cluster, Worker, Topology())
    assert third.run_all("act", how={}) == ["rank 0 is fine"]
    assert second.shutdown() and third.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("by", ["server", "no server", "a server that is gone", "refusal"])
def test_a_worker_starts_whatever_became_of_the_server(
    server: ForkServer, tmp_path: Path, by: str
) -> None:
    gone = str(tmp_path / "gone")
    address = {"no server": {}, "a server that is gone": {ADDRESS: gone}}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    context: dict[str, Any] = {"env_vars": {"A": "${HOME}/a"}, "py_executable": sys.executable}
    if by == "refusal":
        context["command_prefix"] = ["true", "&&"]
    done = subprocess.run(
        [
            *(sys.executable, str(START)),
            f"--serialized-runtime-env-context={json.dumps(context)}",
            *("--language=PYTHON", str(script), "--one=1"),
        ],
        env=os.environ | address.get(by, {ADDRESS: server.address}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    started_by = server.pid if by == "server" else os.getpid()
    told = f"['{script}', '--one=1'] {started_by} {os.environ['HOME']}/a __main__ {script} "
    assert (done.stdout, done.stderr) == (f"{told}{by == 'server'}\n", "to standard error")
