"""The ways to start a policy without Ray: torchrun, and plainly in one process. On the CPU a policy
takes few threads of its process, and gives back all of them when it is shut down, whether or not it
is kept, and before Python's collector has found anything.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import policy_config
from tests.dist.layouts import OVERLAPPED
from tests.losses import TokenNLL
from tests.other_process import OtherProcess

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


MOST = 12
"""Threads of one policy on one rank."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron-Core": ("qwen2", {}),
    "distributed optimizer": ("qwen2", OVERLAPPED),
    "experts": ("qwen3_moe", {"activation_checkpointing": True}),
    "MLA": ("deepseek_v3", {}),
    "FSDP2": ("qwen2", {"dtensor_cfg": {}}),
    "FSDP1": ("qwen2", {"fsdp_cfg": {}}),
}


@pytest.fixture
def process() -> Iterator[OtherProcess]:
    made = OtherProcess()
    yield made
    made.kill()


def threads() -> int:
    """Those of this process, without torch's own for backward passes, which it makes once."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(not name.startswith("pt_autograd") for name in names)


def use(policy: MegatronPolicy, root: Path) -> None:
    """Train, score, export and save."""
    ids = torch.arange(64).reshape(8, 8) % 40
    rows = {"token_mask": torch.ones(8, 8), "sample_mask": torch.ones(8)}
    policy.train(BatchedDataDict({"input_ids": ids, **rows}), TokenNLL())
    policy.logprobs(BatchedDataDict({"input_ids": ids}))
    dict(policy.export())
    policy.save_checkpoint(root / f"step_{policy.steps}", root / f"optimizer_{policy.steps}")


def count_one_after_another(config: dict[str, Any], root: Path) -> list[Any]:
    """Threads before, with each of three policies, and after the shutdown of each: first in groups
    of their own, then in one that was there before them, and which they must not end with them.
    """
    gc.disable()
    prepare_platform()
    seen, kept = [], []
    for joined in (False, True):
        if joined:
            join_process_group(60.0)
        before, with_it, after = threads(), [], []
        for number in range(3):
            kept.append(MegatronPolicy(config))
            use(kept[-1], root / f"{joined}{number}")
            with_it.append(threads())
            kept[-1].shutdown()
            after.append(threads())
        assert torch.distributed.is_initialized() == joined
        seen.append((before, with_it, after))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_gives_back_its_few_threads_at_shutdown(
    process, checkpoint, tmp_path, kind: str
) -> None:
    family, section = KINDS[kind]
    config = policy_config(checkpoint(family), section)
    (before, with_it, after), joined = process.call(count_one_after_another, config, tmp_path)
    assert max(with_it) <= before + MOST
    assert after == [before] * 3
    assert len(set(joined[2])) == 1, joined


def count_two_at_once(config: dict[str, Any], root: Path) -> tuple[int, int, int]:
    """Threads before, with two policies of one process, and when both are shut down."""
    gc.disable()
    before = threads()
    first, second = MegatronPolicy(config), MegatronPolicy(config)
    both = threads()
    first.shutdown()
    use(second, root)
    second.shutdown()
    return before, both, threads()


@pytest.mark.parametrize("kind", ["Megatron-Core", "FSDP2"])
def test_the_first_of_two_policies_leaves_the_other_whole(
    process, checkpoint, tmp_path, kind: str
) -> None:
    family, section = KINDS[kind]
    config = policy_config(checkpoint(family), section)
    before, both, after = process.call(count_two_at_once, config, tmp_path)
    assert both <= before + 2 * MOST
    assert after == before
