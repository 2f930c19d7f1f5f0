"""One import, or exports, of the engine over transformers' own modules on one rank:
`python -m benchmarks.fsdp_once PROGRAM CHECKPOINT [TURNS]` prints its cost.

Python's imports, the config file and the process group are not part of an import; building modules
is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils
import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - neither is part of an import
from safetensors import safe_open

from benchmarks.export_once import beside_memcpy
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.converters.table import bind
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.hugging_face.assemble import build
from megatron_policy.policy import MegatronPolicy

CONFIG = {
    "precision": "float32",
    "train_global_batch_size": 1,
    "train_micro_batch_size": 1,
    "max_total_sequence_length": 128,
    "dtensor_cfg": {"enabled": True},
}


def floor(path: Path) -> dict[str, float]:
    """Each tensor is read and copied once."""
    started = time.process_time()
    weights = {}
    with safe_open(path / SINGLE, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118
            tensor = source.get_tensor(name)
            weights[name] = torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor)
    seconds = time.process_time() - started
    _verify(path, weights)
    return {"cpu_s": seconds}


def ours(path: Path) -> dict[str, float]:
    """The model is built, sharded and filled, without optimizer or reference."""
    config = PolicyConfig.parse({"model_name": str(path)} | CONFIG)
    table = bind(read_config(path))
    join_process_group(DEFAULT_TIMEOUT_S)
    topology = topology_of(config, 1)
    started = time.process_time()
    engine = build(config, table, topology, init_optimizer=False, timeout_s=DEFAULT_TIMEOUT_S)
    seconds = time.process_time() - started
    weights = {}
    for entry, parameter in engine.held:
        (weights[entry.hf[0]],) = (parameter,)
    _verify(path, weights)
    return {"cpu_s": seconds}


def exports(path: Path, turns: int) -> dict[str, Any]:
    """Alternate exports with copies of as many bytes in one piece."""
    config = {"model_name": str(path)} | CONFIG
    policy = MegatronPolicy(config, init_optimizer=False, init_reference_model=False)
    return beside_memcpy(policy.exporter, path, turns)


def _verify(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """RuntimeError unless the weights are those of the checkpoint, all of them, bit for bit."""
    with safe_open(path / SINGLE, framework="pt") as source:
        if source.keys() != sorted(weights):
            raise RuntimeError(f"other tensors were imported: {sorted(weights)}")
        for name, weight in weights.items():
            if not torch.equal(source.get_tensor(name), weight):
                raise RuntimeError(f"{name} was not imported faithfully")


def run(program: str, path: str, *turns: str) -> dict[str, Any]:
    """What the command line asks for."""
    if program == "export":
        return exports(Path(path), int(turns[0]))
    return {"floor": floor, "ours": ours}[program](Path(path))


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
