"""Figures of speed where times are those of the device, and its figures can be known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.device.profiling import device_name
from megatron_policy.estimate.devices import figures_of
from tests.dist.cases import GLOBAL_BATCH, open_policy, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.dist.test_profile import profiled
from tests.losses import TokenNLL
from tests.oracle import make_batch


def speed(config: dict[str, Any]) -> tuple[dict[str, float], str]:
    with open_policy(config, init_reference_model=False) as policy:
        data = make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
        return policy.train(data, TokenNLL())["speed"], device_name()


@pytest.mark.gpu
def test_times_are_of_the_device_and_mfu_is_known_with_its_figures(gpu_ranks, checkpoint) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, precision="bfloat16")
    ((found, name),) = gpu_ranks.run(1, speed, config)
    parts = [found[f"{part}_seconds"] for part in ("forward_backward", "reduce", "step")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < 1.01 * found["seconds"]  # two clocks
    assert found["peak_memory_bytes"] > 0
    assert ("mfu" in found) == (figures_of(name) is not None)
    assert 0 < found.get("mfu", 0.5) < 1


@pytest.mark.gpu
def test_a_profile_has_the_kernels_of_the_gpu(gpu_ranks, checkpoint, tmp_path: Path) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, precision="bfloat16")
    (profile,) = gpu_ranks.run(1, profiled, config, tmp_path, True)
    with gzip.open(tmp_path / "rank_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [each for each in events if each.get("cat") == "kernel"]
    assert kernels and all(each["dur"] > 0 for each in kernels)
    slowest = {each["name"] for each in profile.summary["slowest_operations"]}
    assert slowest & {each["name"] for each in kernels}
