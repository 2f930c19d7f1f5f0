"""One import: `python -m benchmarks.import_once PROGRAM CHECKPOINT` prints its cost.

Python's imports, the config file and the process group are not part of it; building modules is.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.checkpoints import BLOCK
from benchmarks.floor import copy_weights
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.converters.rows import unpack
from megatron_policy.converters.table import bind
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.assemble import build
from megatron_policy.engines.megatron.engine import MegatronEngine
from megatron_policy.engines.megatron.platform import prepare_platform


def floor(path: Path) -> dict[str, float]:
    """One import by the shortest possible program."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    started = time.process_time()
    weights = copy_weights(path / SINGLE, config)
    seconds = time.process_time() - started
    _verify(path, weights)
    return {"cpu_s": seconds}


def ours(path: Path) -> dict[str, float]:
    """One import as the policy does it: modules built and filled, without optimizer or
    reference.
    """
    run = _prepared(path)
    started = time.process_time()
    assembly = run()
    seconds = time.process_time() - started
    _verify(path, {entry.megatron: parameter.data for entry, parameter in assembly.held})
    return {"cpu_s": seconds}


def memory(path: Path) -> dict[str, float]:
    """The same import, with its anonymous memory sampled every millisecond."""
    run = _prepared(path)
    started = time.process_time()
    with _watching_memory() as samples:
        assembly = run()
    seconds = time.process_time() - started
    weights = {entry.megatron: parameter.data for entry, parameter in assembly.held}
    _verify(path, weights)
    return {
        "cpu_s": seconds,
        "peak_bytes": max(samples) - samples[0],
        "weight_bytes": sum(weight.nbytes for weight in weights.values()),
    }


def _prepared(path: Path) -> Callable[[], MegatronEngine]:
    """What remains after Python's imports, reading the config and creating the process group."""
    config = PolicyConfig.parse(
        {
            "model_name": str(path),
            "precision": "bfloat16",
            "train_global_batch_size": 1,
            "train_micro_batch_size": 1,
            "max_total_sequence_length": 128,
            "megatron_cfg": {"enabled": True},
        }
    )
    table = bind(read_config(path))
    prepare_platform()
    join_process_group(DEFAULT_TIMEOUT_S)
    return lambda: build(
        config,
        table,
        topology_of(config, 1),
        init_optimizer=False,
        timeout_s=DEFAULT_TIMEOUT_S,
    )


def _verify(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """RuntimeError unless the weights are those of the checkpoint, all of them, bit for bit."""
    table = bind(read_config(path))
    with safe_open(path / SINGLE, framework="pt") as source:
        unseen = set(source.keys())
        for entry in table.exported():
            whole = weights[entry.megatron].view(entry.row.local_shape(table.architecture, 1))
            parts = unpack(entry.row, table.architecture, whole)
            for name, part in zip(entry.hf, parts, strict=True):
                unseen -= {name, f"{name}_scale_inv"}
                if not torch.equal(part, _expected(source, name)):
                    raise RuntimeError(f"{name} was not imported faithfully into {entry.megatron}")
    if unseen:
        raise RuntimeError(f"not imported: {sorted(unseen)}")


def _expected(source: Any, name: str) -> torch.Tensor:
    """The tensor of the file; one in fp8 is multiplied by its scales, and rounded to bf16."""
    tensor = source.get_tensor(name)
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    scales = source.get_tensor(f"{name}_scale_inv")
    for dim, length in enumerate(tensor.shape):
        scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, length)
    return (tensor.float() * scales).bfloat16()


@contextmanager
def _watching_memory() -> Iterator[list[int]]:
    """Bytes of this process's anonymous memory, sampled before, during and after the body."""
    samples = [_anonymous_bytes()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()
        samples.append(_anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kibibytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kibibytes) * 1024


if __name__ == "__main__":
    program = {"floor": floor, "ours": ours, "memory": memory}[sys.argv[1]]
    print(json.dumps(program(Path(sys.argv[2]))))
