"""Starts Ray's workers as forks of one process that has imported everything slow.

`ForkServer` is the end of the test process. Ray starts `tests/start_ray_worker.py` in place of its
own script, and that asks the server for a fork. A worker with the variable PLAIN in its runtime
environment starts as Ray starts it, and so does every worker when there is no server.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START = Path(__file__).with_name("start_ray_worker.py")
ADDRESS = "TESTS_FORK_SERVER"  # the variable that leads a starting worker to the server
PLAIN = "TESTS_PLAIN_WORKER"  # a worker that has it imports everything itself
FORKED, REFUSED = b"f", b"r"
PREFIXES = tuple({f"{Path(path)}{os.sep}" for path in (sys.prefix, sys.base_prefix)})


class ForkServer:
    """A process that forks; it ends with `end`, or with this process. What it forked goes on."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="fork-")
        self.address = str(Path(self._folder, "s"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.fork_server", str(listener.fileno())],
                cwd=ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, which is that of every fork's parent."""
        return self._process.pid

    @contextmanager
    def for_ray(self) -> Iterator[None]:
        """A Ray that is started within forks its workers here."""
        from ray._private import ray_constants

        before, ray_constants.SETUP_WORKER_FILENAME = (
            ray_constants.SETUP_WORKER_FILENAME,
            str(START),
        )
        os.environ[ADDRESS] = self.address
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = before
            del os.environ[ADDRESS]

    def end(self) -> None:
        """End it; afterwards workers start without it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@dataclass(frozen=True)
class Worker:
    """A worker that asks to be forked: Ray's arguments, and the process that it is to become."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]  # of its standard input, output and error

    @staticmethod
    def received(connection: socket.socket) -> Worker:
        data, descriptors, *_ = socket.recv_fds(connection, 2**16, 3)
        while part := connection.recv(2**16):
            data += part
        return Worker(**json.loads(data), descriptors=descriptors)

    def can_be_forked(self) -> bool:
        """Whether it is a Python worker in this interpreter, with nothing around it."""
        asked, context = self._asked()
        return (
            asked.language == "PYTHON"
            and context.get("py_executable") == sys.executable
            and not context.get("command_prefix")
            and not context.get("override_worker_entrypoint")
            and not context.get("env_vars", {}).get(PLAIN)
        )

    def become(self) -> str:
        """Make this process that worker's; the script that it is to run."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # Ray ends the group of a worker's processes with it
        for target, descriptor in enumerate(self.descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(self.folder)
        asked, context = self._asked()
        os.environ.clear()
        os.environ.update(self.environment)
        for name, value in context.get("env_vars", {}).items():
            os.environ[name] = os.path.expandvars(value)
        limit_threads()
        sys.argv = asked.command
        searched = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        installed = (entry for entry in sys.path if entry.startswith(PREFIXES))
        sys.path = [str(Path(sys.argv[0]).parent), *searched, *installed]
        return sys.argv[0]

    def _asked(self) -> tuple[argparse.Namespace, dict[str, Any]]:
        """Ray's arguments, and what the runtime environment makes of the process."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language")
        asked, command = parser.parse_known_args(self.argv)
        asked.command = command
        return asked, json.loads(asked.serialized_runtime_env_context)


def limit_threads() -> None:
    """As many threads as the environment says, which torch has read in the server."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def serve(listener: socket.socket) -> Worker | None:
    """Fork what comes until standard input is closed. In a fork, return the worker that it is."""
    # Without Ray, which reads the environment of a worker when it is imported.
    import tests.preload  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("imports have started threads, and a fork would not have them")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            worker = Worker.received(connection)
            if not worker.can_be_forked():
                connection.sendall(REFUSED)
            elif os.fork() == 0:
                connection.sendall(FORKED)
                listener.close()
                return worker
            for descriptor in worker.descriptors:
                os.close(descriptor)


if __name__ == "__main__":
    # A fork leaves `serve`, and ends as a Python of its own: with its threads and exit handlers.
    if (worker := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        runpy.run_path(worker.become(), run_name="__main__")
