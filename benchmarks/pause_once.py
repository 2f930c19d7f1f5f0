"""An engine that follows a training: `python -m benchmarks.pause_once CHECKPOINT STEPS` starts it
in a process of its own, trains in this one, and prints seconds of steps and of the engine's pauses.

After each step a refit of what has changed begins, and goes on beside the next step. The engine can
answer while versions arrive and are checked: only while the receiver calls `load`, which copies the
new one into the weights that it serves, it cannot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import ROOT
from benchmarks.train_steps import NextTokenLoss, Shape, make_batches, make_config
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.digest import HOST, digest
from megatron_policy.refit.exporter import stream_tensors
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.ipc.transport import IpcStream

ENGINE = "engine"
LEAVES_S = 60.0
SHAPE = Shape(precision="bfloat16")
RATE = 1e-6
"""As in reinforcement learning: few elements change in bf16."""


def main(path: Path, steps: int) -> dict[str, Any]:
    """Seconds of every step but the first, which sends all weights; those of the engine's pauses;
    and the bytes that the last refit has sent for each byte of the weights.
    """
    config = make_config(path, SHAPE)
    config["megatron_cfg"]["optimizer"] = {"lr": RATE, "min_lr": RATE}
    policy = MegatronPolicy(config, init_reference_model=False)
    plan = policy.exporter.plan()
    forms = {name: [list(shape), str(dtype)] for name, (shape, dtype) in plan.info().items()}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pause-") as folder:
        shapes, to = Path(folder, "forms.json"), DeltaStream(IpcStream(f"ipc://{folder}/s"))
        shapes.write_text(json.dumps(forms), encoding="utf-8")
        engine = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pause_once", ENGINE, folder, str(steps + 1)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for batch in make_batches(steps + 1, read_config(path)["vocab_size"], SHAPE):
                began = time.perf_counter()
                policy.train(batch, NextTokenLoss())
                policy.begin_refit(to)  # waits for the one before
                seconds.append(time.perf_counter() - began)
            sent = policy.finish_refit()
            said, _ = engine.communicate(timeout=LEAVES_S)
        finally:
            engine.kill()
            engine.wait()
    follower = json.loads(said.splitlines()[-1])
    own = {name: digest(tensor, HOST) for name, tensor in stream_tensors(policy.exporter, plan)}
    if follower["digests"] != own:
        raise RuntimeError("the engine's weights are not those of the last step")
    if sent is None or not sent.changed_bytes:
        raise RuntimeError("the last refit has sent all weights, not what has changed")
    policy.shutdown()
    share = sent.changed_bytes / sum(tensor.nbytes for tensor in plan.tensors)
    return {"steps": seconds[1:], "pauses": follower["pauses"][1:], "sent": share}


def follow(folder: Path, refits: int) -> dict[str, Any]:
    """Receive so many versions into weights of this process: seconds of each pause, and digests of
    the last version.
    """
    forms = {
        name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in json.loads((folder / "forms.json").read_text()).items()
    }
    served = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in forms.items()}
    pauses: list[float] = []

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        began = time.perf_counter()
        for name, tensor in tensors:
            served[name].copy_(tensor)
        pauses.append(time.perf_counter() - began)

    receiver = Receiver(load, expected=forms)
    for _ in range(refits):
        receiver.receive_ipc_stream(f"ipc://{folder}/s")
    digests = {name: digest(tensor, HOST) for name, tensor in served.items()}
    return {"pauses": pauses, "digests": digests}


if __name__ == "__main__":
    if sys.argv[1] == ENGINE:
        print(json.dumps(follow(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
