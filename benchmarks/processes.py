"""Runs a measuring program in new Python processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_policy.coordination.rendezvous import reserved_port

ROOT = Path(__file__).resolve().parent.parent

# One thread, so that CPU seconds are work, not waiting.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def run_fresh(module: str, *arguments: str | Path, gpus: bool = False) -> dict[str, Any]:
    """Run `python -m module arguments` and return the JSON object on its last line of output. With
    `gpus` it sees those of this process.

    RuntimeError with its stderr if it failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(gpus), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[2:])} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def environment(gpus: bool) -> dict[str, str]:
    """The environment of a measuring program."""
    return os.environ | ENVIRONMENT | ({} if gpus else WITHOUT_GPUS)


def run_ranks(
    world: int, module: str, *arguments: str | Path, limit_s: float = 300.0, gpus: bool = False
) -> list[dict[str, Any]]:
    """Run the module in `world` processes that can communicate; return the JSON object of each.
    With `gpus` each takes one of those that this process sees.

    RuntimeError with a process's stderr if it failed or takes longer than `limit_s` seconds; none
    is left running.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        logs = [Path(folder, f"{rank}.{kind}") for rank in range(world) for kind in ("out", "err")]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                out, err = logs[2 * rank : 2 * rank + 2]
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    env = environment(gpus) | _rendezvous(rank, world, port)
                    processes.append(
                        subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=stderr)
                    )
            codes = _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        # Blame the rank that failed first, not those killed because of it, or the one that timed
        # out.
        failed = [rank for rank, code in enumerate(codes) if code]
        for rank in failed or [rank for rank, code in enumerate(codes) if code is None]:
            how = f"ended with status {codes[rank]}" if failed else f"took over {limit_s:g} s"
            said = logs[2 * rank + 1].read_text(errors="replace")[-4000:]
            raise RuntimeError(f"rank {rank} {how}:\n{said}")
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs[::2]]


def _rendezvous(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # a container's host name need not resolve
    }


def _wait(processes: list[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Wait until all have ended, one has failed, or time is up; return the exit statuses."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)
