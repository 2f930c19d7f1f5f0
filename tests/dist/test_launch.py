"""The ways to start a policy without Ray: torchrun, and plainly in one process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import OVERLAPPED
from tests.losses import TokenNLL

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import json, sys
from megatron_policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import own_share, policy_config
from tests.losses import TokenNLL

path, tp, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
data = oracle.make_batch(8, 12, 251)
for turn in range(2):  # torchrun keeps one store for both, with the addresses of the first
    policy = MegatronPolicy(policy_config(path, {"tensor_model_parallel_size": tp}))
    result = policy.train(own_share(policy, data), TokenNLL())
    if policy.rank == 0 and turn:
        with open(out, "w") as file:
            json.dump([result["loss"].item(), result["grad_norm"].item()], file)
    policy.shutdown()
"""
LAUNCHERS = {
    "one process": ([sys.executable], 1),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        2,
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_trains_under_each_launcher(checkpoints, tmp_path, launcher: str) -> None:
    command, tp = LAUNCHERS[launcher]
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, str(script), str(checkpoints[True]), str(tp), str(out)],
        env=environment | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    data = oracle.make_batch(8, 12, 251)
    hf = oracle.Learned.of(checkpoints[True], data, 8, oracle.token_level)
    loss, norm = map(torch.tensor, json.loads(out.read_text()))
    hf.assert_same_loss(loss, 0)
    hf.assert_same_norm(norm, 0)


@pytest.mark.parametrize(
    ("family", "megatron"), [("qwen2", {}), ("mixtral", {}), ("qwen2", OVERLAPPED)]
)
def test_policies_one_after_another_leave_nothing_of_their_groups(
    ranks, checkpoint, family: str, megatron: dict[str, Any]
) -> None:
    """In a process group that was there before them, which they must not end with them."""
    counts = ranks.run(1, threads_after_policies, policy_config(checkpoint(family), megatron), 3)
    assert [len(set(seen)) for seen in counts] == [1], counts


def threads_after_policies(config: dict[str, Any], policies: int) -> list[int]:
    prepare_platform()
    join_process_group(60.0)
    data = oracle.make_batch(GLOBAL_BATCH, 12, 251)
    counts = []
    for _ in range(policies):
        with open_policy(config, init_reference_model=False) as policy:
            policy.train(own_share(policy, data), TokenNLL())
        del policy
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts
