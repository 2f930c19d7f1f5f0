"""A process beside the test's, which calls functions it is sent, whatever they do."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.rank_process import environment
from tests.ranks import ENVIRONMENT

TIMEOUT = 60.0


class OtherProcess:
    """Calls module-level functions, one at a time; it ends with the test process at the latest.

    It forks from the server of the rank pool, which has imported everything slow; a `clean` one has
    imported nothing but what it is sent. It sees no GPU, unless it is clean and `on_gpu`.
    """

    def __init__(self, clean: bool = False, on_gpu: bool = False) -> None:
        context = mp.get_context("spawn" if clean else "forkserver")
        if not clean:
            context.set_forkserver_preload(["tests.preload"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        assert clean or not on_gpu, "a GPU's context does not survive a fork"
        with environment(ENVIRONMENT if on_gpu else {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}):
            self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        """Let it call `fn(*args)`; `result` is to follow."""
        self._pipe.send((fn, args))

    def result(self, timeout: float = TIMEOUT) -> Any:
        """What the call that was begun returned, or its exception; EOFError when it was killed."""
        assert self._pipe.poll(timeout), f"no result within {timeout:g} s"
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`begin` and `result`."""
        self.begin(fn, *args)
        return self.result()

    def kill(self) -> None:
        """End it as nothing can be caught, and wait until it is gone."""
        self._process.kill()
        self._process.join(TIMEOUT)

    def stop(self) -> None:
        """Stop it as Ctrl-Z does; return when none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT
        while any(_state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        """Let it go on after `stop`."""
        os.kill(self.pid, signal.SIGCONT)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return "T"


def shared_memory_of(pid: int | str) -> list[str]:
    """What a process has mapped or open of files without a name, that is of our shared memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line for line in maps if _is_ours(line)]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            found += [target] if _is_ours(target) else []
    return found


def _is_ours(file: str) -> bool:
    return file.endswith("(deleted)") and ("/dev/shm/#" in file or "/memfd:refit" in file)


def read_results(processes: Iterable[OtherProcess], timeout: float) -> list[Any]:
    """What the calls that were begun returned; None of processes that were killed."""
    found = []
    for process in processes:
        try:
            found.append(process.result(timeout))
        except EOFError:
            found.append(None)
    return found


def _serve(pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            fn, args = pipe.recv()
            try:
                answer = (True, fn(*args))
            except Exception as error:
                # Without its traceback: nothing of the call may stay alive in this process.
                answer = (False, error.with_traceback(None))
                answer[1].__cause__ = answer[1].__context__ = None
            pipe.send(answer)
            del answer


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
