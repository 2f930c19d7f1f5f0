"""Processes of hosts: Ray's head, and scripts that are run to their end, whatever that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_policy.coordination.rendezvous import reserved_port
from tests.fork_server import ADDRESS, START, ForkServer
from tests.ranks import ROOT

STOP_S = 60.0
STARTS = 3
WAIT = ROOT / "examples" / "cluster" / "wait_for_nodes.py"
FORKING = """
import sys
from ray._private import ray_constants
from ray.scripts.scripts import main
ray_constants.SETUP_WORKER_FILENAME = sys.argv.pop(1)
main()
"""
"""Ray's own command, after the script that starts a worker."""


def environment(**own: str) -> dict[str, str]:
    """What a host's processes inherit: this checkout on their path, and no network."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path))),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        **own,
    }


@contextmanager
def ray_head(
    env: Mapping[str, str], folder: Path, *, gpus: int, cpus: int, forks: ForkServer | None = None
) -> Iterator[str]:
    """A Ray instance with these in its books; its address. Its processes end with this context. Its
    workers are `forks` of that server, where there is one.
    """
    with reserved_port() as port:
        pass
    start = ["-c", FORKING, str(START)] if forks else ["-m", "ray.scripts.scripts"]
    env = {**env, ADDRESS: forks.address} if forks else env
    command = [
        *(sys.executable, *start, "start", "--head", "--block"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1"),
        *(f"--num-gpus={gpus}", f"--num-cpus={cpus}"),
        *("--include-dashboard=false", f"--temp-dir={folder}"),
    ]
    address = f"127.0.0.1:{port}"
    for _ in range(STARTS):
        ray = subprocess.Popen(command, env=dict(env), start_new_session=True)
        if _has_its_node(ray, address, env):
            break
        _end(ray)
    else:
        raise AssertionError(f"Ray has ended {STARTS} times while it started: see {folder}")
    try:
        yield address
    finally:
        _end(ray)


def _has_its_node(ray: subprocess.Popen[bytes], address: str, env: Mapping[str, str]) -> bool:
    """Wait until the node has joined. False if Ray ends meanwhile: its node waits no more than 30
    seconds for its own agents, which a busy machine needs.
    """
    waiting = subprocess.Popen(
        [sys.executable, str(WAIT), address, "1"], env=dict(env), stdout=subprocess.DEVNULL
    )
    try:
        while waiting.poll() is None:
            if ray.poll() is not None:
                return False
            time.sleep(0.2)
        return waiting.returncode == 0
    finally:
        waiting.kill()
        waiting.wait()


def _end(ray: subprocess.Popen[bytes]) -> None:
    # Alone: it asks the others to drain first, and waits for them.
    ray.terminate()
    try:
        ray.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """How a script ended, and what it and its processes printed."""

    code: int
    said: str


def run_to_its_end(
    command: Sequence[str], env: Mapping[str, str], folder: Path, limit_s: float
) -> Ended:
    """Run a command in `folder`. AssertionError, with what it has printed, if it takes longer; none
    of its processes is left.
    """
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(env),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            said = log.read_text(errors="replace")[-8000:]
            raise AssertionError(f"not at its end after {limit_s:g} s:\n{said}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
    return Ended(code, log.read_text(errors="replace"))
