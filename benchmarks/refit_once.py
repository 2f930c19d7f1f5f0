"""Refits over IPC between two processes on one device: `python -m benchmarks.refit_once CHECKPOINT
TURNS`, which starts the engine, alternates refits with copies of as many bytes on the device, and
prints the seconds of every turn.

The first engine loads piece by piece. The second stages all weights and checks them before it loads
them, as receivers do by default, which is one more copy of every byte.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_once import WARM_UP, timed
from benchmarks.export_once import policy_on
from benchmarks.processes import ROOT
from megatron_policy import device
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.transport import IpcStream

ENGINE = "engine"
STARTED = "started"
LEAVES_S = 60.0


def main(path: Path, turns: int) -> dict[str, Any]:
    """Measure a policy's refits to each engine; RuntimeError if one fails."""
    policy = policy_on(path, {})
    total = sum(tensor.nbytes for tensor in policy.exporter.plan().tensors)
    ways = {"piece by piece": False, "staged": True}
    seconds = {way: _to_an_engine(policy, turns, staged) for way, staged in ways.items()}
    policy.shutdown()
    return {"seconds": seconds, "bytes": total}


def _to_an_engine(policy: MegatronPolicy, turns: int, staged: bool) -> dict[str, list[float]]:
    info = policy.exporter.plan().info()
    forms = {name: [list(shape), str(dtype)] for name, (shape, dtype) in info.items()}
    with tempfile.TemporaryDirectory(prefix="refit-") as folder:
        address, shapes = f"ipc://{folder}/s", Path(folder, "forms.json")
        shapes.write_text(json.dumps(forms), encoding="utf-8")
        refits = str(turns + WARM_UP)
        command = [sys.executable, "-m", "benchmarks.refit_once", ENGINE, address]
        engine = subprocess.Popen(
            [*command, str(shapes), refits, str(int(staged))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout is not None
            if engine.stdout.readline().strip() != STARTED:
                raise RuntimeError("the engine did not start: see its error above")
            seconds = _alternate(policy, address, turns)
            if engine.wait(LEAVES_S):
                raise RuntimeError(f"the engine ended with status {engine.returncode}")
        finally:
            engine.kill()
            engine.wait()
    return seconds


def _alternate(policy: MegatronPolicy, address: str, turns: int) -> dict[str, list[float]]:
    total = sum(tensor.nbytes for tensor in policy.exporter.plan().tensors)
    source = torch.empty(total, dtype=torch.uint8, device=device.current_device()).fill_(1)
    target = torch.empty_like(source)
    seconds: dict[str, list[float]] = {"copy": [], "refit": []}
    for turn in range(-WARM_UP, turns):
        copying = timed(lambda: target.copy_(source))
        sent = policy.refit(IpcStream(address))
        if sent.total_bytes != total:
            raise RuntimeError(f"{sent.total_bytes} of {total} bytes were sent")
        if turn >= 0:
            seconds["copy"].append(copying)
            seconds["refit"].append(sent.seconds)
    return seconds


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """`main` with the arguments of the command line."""
    return main(Path(arguments[0]), int(arguments[1]))


def engine(address: str, shapes: Path, refits: int, staged: bool) -> None:
    """Receive into weights on this process's device; every tensor's digest is compared."""
    where = device.place_process()
    forms = {
        name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in json.loads(shapes.read_text(encoding="utf-8")).items()
    }
    weights = {
        name: torch.zeros(shape, dtype=d, device=where) for name, (shape, d) in forms.items()
    }

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            weights[name].copy_(tensor)

    receiver = Receiver(load, expected=forms, staged=staged)
    print(STARTED, flush=True)
    for _ in range(refits):
        receiver.receive_ipc_stream(address)
    if not all(bool(tensor.any()) for tensor in weights.values()):
        raise RuntimeError("a weight of the engine is still zero")


if __name__ == "__main__":
    if sys.argv[1] == ENGINE:
        engine(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
    else:
        print(json.dumps(run(sys.argv[1:])))
