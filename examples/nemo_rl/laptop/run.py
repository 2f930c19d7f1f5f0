"""`megatron-policy run` for a laptop: with an engine on the CPU in the place of vLLM's GPU worker.

`python run.py SCRIPT [ARGS...]`, for NeMo RL's scripts with `policy.generation.backend=vllm`.
LAPTOP_ENGINE=vllm takes vLLM's CPU build, if it is installed, and transformers else.
MEGATRON_POLICY_WORKERS=all is `--workers all`.
"""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

VLLM = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
ENGINES = {"transformers": "cpu_engine.CpuEngine", "vllm": "cpu_vllm.CpuVllm"}


def replace_vllm(engine: str) -> None:
    """Make NeMo RL start the actor `engine` where it would start its own for vLLM."""
    from nemo_rl.distributed import worker_groups
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    ACTOR_ENVIRONMENT_REGISTRY[engine] = sys.executable
    # Workers import it by that name.
    own, known = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, own)))
    original = worker_groups.RayWorkerBuilder.__init__

    def __init__(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        original(self, engine if name == VLLM else name, *args, **kwargs)

    worker_groups.RayWorkerBuilder.__init__ = __init__


def main() -> None:
    from megatron_policy.hosts import launch, nemo_rl

    program = launch.Program.parse(sys.argv[1:])
    launch.find(program)
    if sys.version_info < (3, 12):
        # NeMo RL is for newer ones, where pydantic takes Python's own.
        typing.TypedDict = typing_extensions.TypedDict
    nemo_rl.install()
    replace_vllm(ENGINES[os.environ.get("LAPTOP_ENGINE", "transformers")])
    launch.run(program)


if __name__ == "__main__":
    main()
