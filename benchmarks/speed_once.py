"""Training steps beside their plan: `python -m benchmarks.speed_once RUN`, RUN being a `Run` as
JSON, on every rank.

Takes the first plan that fits the ranks' devices, trains by it on packed rows, and prints what the
plan says, each step's speed, and the peak of memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_steps import NextTokenLoss
from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.table import bind
from megatron_policy.device.profiling import device_name
from megatron_policy.estimate.devices import DeviceFigures, figures_of
from megatron_policy.estimate.plan import StepPlan, search
from megatron_policy.estimate.states import ModelRows
from megatron_policy.policy import MegatronPolicy

WARM_UP = 2
"""Steps that are not reported: kernels are compiled and memory is allocated."""


@dataclass(frozen=True)
class Run:
    """Steps of `microbatches` for each rank, packed with `tokens` in rows of `length`, and what a
    device does at best, as device_once.py prints it.
    """

    path: str
    implementation: str
    length: int
    tokens: int
    microbatches: int
    steps: int
    device: str
    memory_bytes: int
    product_flops: float
    memory_bandwidth: float

    @property
    def figures(self) -> DeviceFigures:
        """The data sheet's, or what was measured of a device that has none here. Its links then
        take no time. The memory is what the driver reports.
        """
        measured = DeviceFigures(
            self.product_flops, self.memory_bytes, self.memory_bandwidth, math.inf, math.inf
        )
        return replace(figures_of(self.device) or measured, memory_bytes=self.memory_bytes)

    def plan(self, ranks: int) -> StepPlan | None:
        """The first that fits so many devices, or None. Reads the config alone."""
        rows = ModelRows.of(bind(read_config(Path(self.path))))
        found = search(self.section(ranks), rows, ranks, self.figures, self.length)
        return found.fitting[0] if found.fitting else None

    def section(self, ranks: int) -> dict[str, Any]:
        """The `policy` section without a layout."""
        return {
            "model_name": self.path,
            "precision": "bfloat16",
            "train_global_batch_size": ranks * self.microbatches * (self.tokens // self.length),
            "train_micro_batch_size": 1,
            "max_total_sequence_length": self.length,
            "sequence_packing": {"enabled": True, "train_mb_tokens": self.tokens},
            "megatron_cfg": {
                "enabled": True,
                "transformer_impl": self.implementation,
                "bias_activation_fusion": True,
                "apply_rope_fusion": self.implementation != "local",
                "optimizer": {"use_distributed_optimizer": True},
                "distributed_data_parallel_config": {
                    "grad_reduce_in_fp32": True,
                    "overlap_grad_reduce": True,
                    "overlap_param_gather": True,
                },
            },
        }


def main(wanted: Run) -> dict[str, Any]:
    """Train and report; RuntimeError if no plan fits."""
    plan = wanted.plan(int(os.environ.get("WORLD_SIZE", "1")))
    if plan is None:
        raise RuntimeError(f"no layout of {wanted.path} fits the devices")
    policy = MegatronPolicy(plan.config, init_reference_model=False)
    device.reset_peak_memory()
    replicas = policy.topology.dp
    rows = plan.config.train_global_batch_size // replicas
    speeds = []
    for step in range(wanted.steps + WARM_UP):
        batch = _batch(rows, wanted.length, plan.architecture.vocab_size, step, policy.coords.dp)
        result = policy.train(batch, NextTokenLoss())
        if not math.isfinite(float(result["loss"])):
            raise RuntimeError(f"the loss of step {step} is {float(result['loss'])}")
        if step >= WARM_UP:
            speeds.append(result["speed"])
    policy.shutdown()
    axes = ("tp", "cp", "pp", "vpp", "dp")
    return {
        "device": device_name(),
        "layout": {axis: getattr(plan.topology, axis) for axis in axes},
        "planned_bytes": plan.peak,
        "peak_bytes": device.memory_info().peak,
        "least_seconds": plan.time.overlapped,
        "sheet_flops": wanted.figures.bf16_flops if figures_of(wanted.device) else None,
        "speeds": speeds,
    }


def _batch(rows: int, length: int, vocab_size: int, step: int, replica: int) -> BatchedDataDict:
    """One replica's rows: all tokens count."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(vocab_size, (rows, length), generator=generator),
            "input_lengths": torch.full((rows,), length),
            "token_mask": torch.ones(rows, length),
            "sample_mask": torch.ones(rows),
        }
    )


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """`main` with the arguments of the command line."""
    return main(Run(**json.loads(arguments[0])))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
