"""`megatron-policy run` for a laptop: with an engine on the CPU in the place of vLLM.

`python run.py SCRIPT [ARGS...]`, for NeMo RL's scripts with `policy.generation.backend=vllm`.
MEGATRON_POLICY_WORKERS=all is `--workers all`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

VLLM = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
ENGINE = "cpu_engine.CpuEngine"


def replace_vllm() -> None:
    """Make NeMo RL start `CpuEngine` where it would start vLLM."""
    from nemo_rl.distributed import worker_groups
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    ACTOR_ENVIRONMENT_REGISTRY[ENGINE] = sys.executable
    # Workers import it by that name.
    own, known = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, own)))
    original = worker_groups.RayWorkerBuilder.__init__

    def __init__(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        original(self, ENGINE if name == VLLM else name, *args, **kwargs)

    worker_groups.RayWorkerBuilder.__init__ = __init__


def main() -> None:
    from megatron_policy.hosts import launch, nemo_rl

    program = launch.Program.parse(sys.argv[1:])
    launch.find(program)
    nemo_rl.install()
    replace_vllm()
    launch.run(program)


if __name__ == "__main__":
    main()
