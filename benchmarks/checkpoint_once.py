"""Saves and loads of one policy, alternating with plain writing and reading of the same bytes:
`python -m benchmarks.checkpoint_once PROGRAM CHECKPOINT FOLDER TURNS`.

Prints the wall seconds of every turn; on both sides a save waits for the disk. Before the clock
starts, a program's output of an earlier turn is removed and pending writes are flushed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_steps import NextTokenLoss
from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import current_device
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.tensors import flat_bytes
from megatron_policy.memory.pinned_pool import page_locked
from megatron_policy.policy import MegatronPolicy

BUFFER = 64 * 2**20
DIRECTORIES = ("weights", "optimizer")
ROWS, LENGTH = 2, 16


def sync(path: Path, folder: Path, turns: int) -> dict[str, Any]:
    """Blocking saves and plain writes; then loads and plain reads, warm and cold."""
    policy = trained_policy(path, asynchronous=False)
    before = digests(policy)
    seconds: dict[str, list[float]] = {}
    writers = {"write": (write_plainly, folder / "plain"), "save": (save, folder / "saved")}
    for turn in range(turns):
        # The order alternates: memory freed by one program is reused by the next.
        for name in sorted(writers, reverse=turn % 2 == 0):
            program, place = writers[name]
            fresh(place)
            timed(seconds, name, lambda write=program, to=place: write(policy, to))
    plain = sum(size for _, size in files(folder / "plain"))
    shutil.rmtree(folder / "plain")
    written = files(folder / "saved")
    room = [torch.empty(size, dtype=torch.uint8, device=current_device()) for _, size in written]
    buffer = page_locked(BUFFER)
    for state, prepare in {"warm": warm, "cold": cold}.items():
        for _ in range(turns):
            prepare(written)
            timed(seconds, f"read, {state}", lambda: read_plainly(written, buffer, room))
            spoil(policy)
            prepare(written)
            timed(seconds, f"load, {state}", lambda: load(policy, folder / "saved"))
            if digests(policy) != before:
                raise RuntimeError("a load has not brought back what was saved")
    policy.shutdown()
    sizes = {"bytes": sum(size for _, size in written), "plain_bytes": plain}
    return sizes | {"tensors": len(before), "wall_s": seconds}


def background(path: Path, folder: Path, turns: int) -> dict[str, Any]:
    """How long background saves block, in their call and in the next training step, and how long
    they take; the first is reported separately. Also times steps with and without a concurrent
    save.
    """
    policy = trained_policy(path, asynchronous=True)
    seconds: dict[str, list[float]] = {}
    waited: dict[str, list[float]] = {}
    wait = policy._engine.pending_reads.wait
    policy._engine.pending_reads.wait = lambda: timed(waited, "wait", wait)
    for turn in range(turns):
        fresh(folder / "saved")
        timed(seconds, "a step alone", lambda: step(policy))
        waited.clear()
        kind = "the first" if turn == 0 else "a later one"
        started = time.monotonic()
        save(policy, folder / "saved")
        called = time.monotonic() - started
        timed(seconds, "a step beside", lambda: step(policy))
        seconds.setdefault(f"blocked by {kind}", []).append(called + sum(waited["wait"]))
        policy.finalize_async_save()
        seconds.setdefault(f"until {kind} is there", []).append(time.monotonic() - started)
    before = digests(policy)
    load(policy, folder / "saved")
    step(policy)
    if digests(policy) != before:
        raise RuntimeError("a load has not brought back what was saved in the background")
    policy.shutdown()
    return {"wall_s": seconds}


def trained_policy(path: Path, *, asynchronous: bool) -> MegatronPolicy:
    """A policy in bf16 with fp32 main parameters and moments, after one step."""
    config = {
        "model_name": str(path),
        "precision": "bfloat16",
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": LENGTH,
        "megatron_cfg": {
            "enabled": True,
            "optimizer": {"optimizer": "adam", "lr": 1e-4, "use_distributed_optimizer": True},
            "checkpoint": {"async_save": asynchronous},
        },
    }
    policy = MegatronPolicy(config, init_reference_model=False, timeout_s=60.0)
    step(policy)
    return policy


def step(policy: MegatronPolicy) -> None:
    """One training step on a few tokens."""
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    data = {"input_ids": tokens, "input_lengths": torch.full((ROWS,), LENGTH)}
    data |= {"token_mask": torch.ones(ROWS, LENGTH), "sample_mask": torch.ones(ROWS)}
    policy.train(BatchedDataDict(data), NextTokenLoss())


def live(policy: MegatronPolicy) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything of the policy that a checkpoint holds, flat and in place, with its directory."""
    for each in policy._checkpoints._contents.held(with_states=True):
        yield DIRECTORIES[bool(each.kind)], each.tensor


def save(policy: MegatronPolicy, folder: Path) -> None:
    """Save both directories."""
    policy.save_checkpoint(*(folder / name for name in DIRECTORIES))


def load(policy: MegatronPolicy, folder: Path) -> None:
    """Load both directories; RuntimeError if anything is missing."""
    report = policy.load_checkpoint(*(folder / name for name in DIRECTORIES))
    if report.not_restored:
        raise RuntimeError(str(report))


def write_plainly(policy: MegatronPolicy, folder: Path) -> None:
    """Write the same elements from the same memory into one new file per directory, and flush them
    to the disk.
    """
    for name in DIRECTORIES:
        with (folder / name).open("wb", buffering=0) as file:
            for own, tensor in live(policy):
                for piece in host_bytes(tensor) if own == name else ():
                    file.write(piece)
            os.fsync(file.fileno())


def host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A flat tensor's bytes, piece by piece: its own memory or, of one on a GPU, a buffer's. Each
    piece must be used before the next is requested.
    """
    pieces = tensor.view(torch.uint8).split(BUFFER)
    if tensor.device.type == "cpu":
        yield from map(flat_bytes, pieces)
        return
    buffer = page_locked(min(BUFFER, tensor.nbytes))
    for piece in pieces:
        yield flat_bytes(buffer[: piece.nbytes].copy_(piece))


def read_plainly(
    written: list[tuple[Path, int]], buffer: torch.Tensor, room: list[torch.Tensor]
) -> None:
    """Read each file through the buffer into its own memory on the policy's device."""
    for (path, _), target in zip(written, room, strict=True):
        with path.open("rb", buffering=0) as file:
            start = 0
            while count := file.readinto(flat_bytes(buffer)):
                target[start : start + count].copy_(buffer[:count])
                start += count


def files(folder: Path) -> list[tuple[Path, int]]:
    """Every file below the folder, with its size in bytes."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path, path.stat().st_size) for path in found]


def warm(written: list[tuple[Path, int]]) -> None:
    """Load the files into the page cache."""
    buffer = memoryview(bytearray(BUFFER))
    for path, _ in written:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(written: list[tuple[Path, int]]) -> None:
    """Drop the files from the page cache."""
    for path, _ in written:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def fresh(folder: Path) -> None:
    """Make the folder empty, and flush all pending writes to the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()


def spoil(policy: MegatronPolicy) -> None:
    """Overwrite everything that is to be loaded."""
    for _, tensor in live(policy):
        tensor.fill_(7)


def digests(policy: MegatronPolicy) -> list[str]:
    """Digests of everything that a checkpoint holds, tensor by tensor."""
    found = []
    for _, tensor in live(policy):
        digest = Digest()
        for piece in host_bytes(tensor):
            digest.update(piece)
        found.append(digest.text())
    return found


def timed(seconds: dict[str, list[float]], name: str, program: Callable[[], None]) -> None:
    """Run the program, and record its wall seconds under that name."""
    started = time.monotonic()
    program()
    seconds.setdefault(name, []).append(time.monotonic() - started)


if __name__ == "__main__":
    program = {"sync": sync, "background": background}[sys.argv[1]]
    print(json.dumps(program(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
