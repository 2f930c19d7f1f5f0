"""One pass over a checkpoint: `python -m benchmarks.convert_once PROGRAM SOURCE DESTINATION`.

Prints CPU seconds, and peak memory in bytes beyond what Python's imports take. The imports are not
part of the time. The destination is removed just before, so that each program writes to recently
used pages of memory: on virtual machines others are expensive.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint.filesystem  # what Megatron-Core's format is written with

from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.hf_config import read_config

BUFFER = 64 * 2**20


def floor(source: Path, destination: Path) -> None:
    """Read the source's weights file and write it, through one buffer."""
    content = memoryview(torch.empty(BUFFER, dtype=torch.uint8).numpy())
    destination.mkdir()
    with (
        (source / "model.safetensors").open("rb", buffering=0) as old,
        (destination / "model.safetensors").open("wb", buffering=0) as new,
    ):
        while count := old.readinto(content):
            new.write(content[:count])


def to_mcore(source: Path, destination: Path) -> None:
    """HF to Megatron-Core."""
    convert(source, destination, "mcore", max_memory=BUFFER)


def to_hf(source: Path, destination: Path) -> None:
    """Megatron-Core to HF."""
    convert(source, destination, "hf", max_memory=BUFFER)


def check(source: Path, destination: Path) -> None:
    """RuntimeError unless both are equal bit by bit; `destination` can also be a copy."""
    if not (found := verify(source, destination)).equal:
        raise RuntimeError(f"{destination} is not {source}: {found.differences}")


PROGRAMS = {"floor": floor, "to mcore": to_mcore, "to hf": to_hf, "check": check}


def main(name: str, source: Path, destination: Path) -> dict[str, float]:
    """Run a program and measure it."""
    before = _memory("VmRSS")
    if name != "floor":
        read_config(source / "hf" if (source / "hf").is_dir() else source)
    if name != "check":
        shutil.rmtree(destination, ignore_errors=True)
        os.sync()  # pending writes of earlier runs must not count here
    started = time.process_time()
    PROGRAMS[name](source, destination)
    seconds = time.process_time() - started
    return {"cpu_s": seconds, "peak_bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kibibytes,) = (line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kibibytes) * 1024


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
