"""The Megatron-Core side: runs the model in this process, or on several ranks, each a process on
this machine; the first failure ends all.

`python -m megatron_policy.parity.ranks FOLDER` is one of these processes.

Shapes: B rows, S positions, V vocabulary, D model.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_policy import errors
from megatron_policy.config.parallel_sizes import keys_of_sizes
from megatron_policy.config.policy_config import least_section
from megatron_policy.convert.headers import open_headers
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.parity.result import Job, ModelOutputs, draw_batch, keep_output
from megatron_policy.policy import MegatronPolicy

GRACE_S = 3.0  # for the other ranks to report after one has failed
POLL_S = 0.05
JOB = "job.json"
_READING, _REPORT, _LOG = "rank{}.pt", "rank{}.error", "rank{}.log"
_WITHOUT_LOGITS = {"logits": torch.empty(0), "logprobs": torch.empty(0)}


def read_on_ranks(job: Job) -> list[ModelOutputs]:
    """The reading of each rank of the layout, in rank order.

    Raises the error of the first rank that failed, unchanged if it is one for users, and as a
    WorkerError otherwise; the other ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as name, reserved_port() as port:
        folder = Path(name)
        (folder / JOB).write_text(json.dumps(asdict(job)))
        world = job.tp * job.pp
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += (_start(folder, rank, world, port) for rank in range(world))
            # Until all have ended, or shortly after the first failure.
            deadline = math.inf
            while any(each.poll() is None for each in processes) and time.monotonic() < deadline:
                if deadline == math.inf and any(each.returncode for each in processes):
                    deadline = time.monotonic() + GRACE_S
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        _check(folder, [process.returncode for process in processes])
        found = []
        for rank in range(world):
            content = torch.load(folder / _READING.format(rank), weights_only=True)
            found.append(ModelOutputs(**{**_WITHOUT_LOGITS, **content}))
        return found


def main(folder: Path) -> None:
    """Run one rank: write the reading or the error into `folder`."""
    rank = int(os.environ["RANK"])
    try:
        outputs = read_policy(Job(**json.loads((folder / JOB).read_text())))
        content: dict[str, Any] = {"layers": dict(outputs.layers)}
        if rank == 0:
            content |= {"logits": outputs.logits, "logprobs": outputs.logprobs}
        torch.save(content, folder / _READING.format(rank))
    except Exception as error:  # raised again in the process that waits for this one
        report = {"kind": type(error).__name__, "message": str(error)}
        (folder / _REPORT.format(rank)).write_text(json.dumps(report))
        raise


def _start(folder: Path, rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // world)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # a container's host name need not resolve
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with (folder / _LOG.format(rank)).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_policy.parity.ranks", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _check(folder: Path, codes: Sequence[int]) -> None:
    """Raise the error of the rank that caused the failure, if any failed."""
    failed = [rank for rank, code in enumerate(codes) if code]
    reports = {
        rank: json.loads(report.read_text())
        for rank in failed
        if (report := folder / _REPORT.format(rank)).exists()
    }
    for report in reports.values():
        kind = getattr(errors, report["kind"], None)
        if kind in (errors.ConfigError, errors.ConversionError):
            raise kind(report["message"])
    # A rank that was killed is the cause; the others fail because they wait for it.
    for rank in sorted(failed, key=lambda rank: (codes[rank] > 0, rank)):
        code = codes[rank]
        if (found := reports.get(rank)) is not None:
            what = f"failed: {found['kind']}: {found['message']}"
        else:
            log = (folder / _LOG.format(rank)).read_text(errors="replace").strip().splitlines()
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
            last = f"; its last output: {log[-1]}" if log else ""
            what = (ended or f"exited with code {code}") + last
        raise errors.WorkerError(f"rank {rank} {what}", rank)


def read_policy(job: Job) -> ModelOutputs:
    """Run the model: all logits and logprobs, and the outputs of this rank's layers.

    Under sequence parallelism the outputs have this tensor-parallel rank's share of the positions.
    """
    policy = MegatronPolicy(
        make_policy_section(job),
        init_optimizer=False,
        init_reference_model=False,
        timeout_s=job.timeout_s,
    )
    try:
        data = draw_batch(job, open_headers(job.model)[1].architecture.shell)
        layers: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            if job.per_layer:
                for number, layer in policy.decoder_layers():
                    hook = layer.register_forward_hook(keep_output(layers, number))
                    hooks.callback(hook.remove)
            logits_BSV = torch.empty(0)
            if job.sequences is None:
                found, order = policy.topk_logits(data, job.vocab_size, micro_batch_size=job.rows)
                logits_BSV = torch.empty_like(found).scatter_(-1, order, found)
        logprobs_BS = policy.logprobs(data, micro_batch_size=job.rows)[:, 1:]
        rows_first = {n: hidden_SBD.transpose(0, 1) for n, hidden_SBD in layers.items()}
        return ModelOutputs(logits_BSV, logprobs_BS, rows_first)
    finally:
        policy.shutdown()


def join_outputs(job: Job, readings: Sequence[ModelOutputs]) -> ModelOutputs:
    """Join the readings of all ranks, in rank order: tensor-parallel ranks are adjacent."""
    layers: dict[int, torch.Tensor] = {}
    for first in range(0, len(readings), job.tp):
        stage = readings[first : first + job.tp]
        for number, hidden_BSD in stage[0].layers.items():
            shares = [outputs.layers[number] for outputs in stage]
            whole_BSD = torch.cat(shares, dim=1) if job.sequence_parallel else hidden_BSD
            layers[number] = whole_BSD[:, : job.tokens]
    return ModelOutputs(readings[0].logits, readings[0].logprobs, layers)


def make_policy_section(job: Job) -> dict[str, Any]:
    """The configuration of the job's policy, as a host would write it."""
    return least_section(
        job.model,
        job.dtype,
        job.rows,
        keys_of_sizes(asdict(job)),
        train_micro_batch_size=job.rows,
        max_total_sequence_length=job.tokens + (job.sequences is not None),
        # As transformers has it; as engines have it, which are made for so many tokens.
        rope_length="batch" if job.sequences is None else "maximum",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
