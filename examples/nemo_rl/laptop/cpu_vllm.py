"""NeMo RL's own worker for vLLM, on vLLM's CPU build.

What it takes from a GPU is given to it here: where it is, what it sleeps with, and how weights come
to it. All else is NeMo RL's worker and vLLM. `async_engine` and several GPUs for an engine are not
for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

from megatron_policy.hosts.nemo_rl.refit import cpu_address
from megatron_policy.inference.vllm.engine import EXTENSION, VllmEngine

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Each engine would take all cores for itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

MARKS = ("range_push", "range_pop")
"""How NeMo RL tells CUDA's profiler what it does. Where torch has no CUDA they raise."""


def _no_mark(*arguments: Any) -> None:
    """Tell nobody."""


class Worker(VllmGenerationWorkerImpl):
    """Under the names by which NeMo RL calls vLLM's worker."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        os.environ.update(ENVIRONMENT)
        for name in MARKS:
            setattr(torch.cuda.nvtx, name, _no_mark)
        # NeMo RL's methods for vLLM's workers open the IPC handles of CUDA's tensors.
        own = {"worker_extension_cls": EXTENSION, "enable_sleep_mode": False}
        super()._create_engine({**llm_kwargs, **own})
        self._engine = VllmEngine(self.llm)

    def post_init(self) -> None:
        """Say where this engine is."""
        self.vllm_device_ids = self.report_device_id()

    def report_device_id(self) -> list[str]:
        """Where this engine is."""
        return [cpu_address()]

    # -- refits ----------------------------------------------------------------------------------

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """The names, shapes and dtypes of the weights to come."""
        self._engine.prepare(state_dict_info)

    def update_weights_via_ipc_zmq(self) -> bool:
        """Take the weights of the training worker beside this one."""
        step = self._engine.receive_stream(cpu_address())
        print(f"vLLM has the weights of step {step}")
        return True

    # -- what takes effect on GPUs only ----------------------------------------------------------

    def wake_up(self, **kwargs: Any) -> None:
        """Do nothing: the weights have stayed."""

    def sleep(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Do nothing: the process ends."""
        return True


@ray.remote
class CpuVllm(Worker):
    """`Worker` as an actor."""
