"""Processes of policies without Ray: how they start, torchrun's and a plain one; that on the CPU a
policy takes few threads, and gives back all of them when it is shut down, whether or not it is
kept, and before Python's collector has found anything; and that a rank which leaves when its part
is done takes nothing away from the others, and one that leaves before hears, and lets them hear,
what happened.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.errors import CheckpointError, RefitError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, OVERLAPPED
from tests.losses import TokenNLL
from tests.other_process import OtherProcess
from tests.soak.saves import CASES, LAG_S, MODEL, Stage

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
    "one process": ([], 1),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 2),
}


def run_python(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program of Python on the CPU that is not a rank."""
    outer = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=outer | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_trains_under_each_launcher(checkpoints, tmp_path, launcher: str) -> None:
    command, tp = LAUNCHERS[launcher]
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    done = run_python(*command, script, checkpoints[True], tp, out)
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


UNUSED = {"init_optimizer": False, "init_reference_model": False}
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def model(checkpoint) -> Path:
    return checkpoint("qwen2", **MODEL)


@pytest.mark.parametrize("name", CASES)
def test_what_rank_0_was_last_to_do_succeeds_on_every_rank(model, tmp_path, name: str) -> None:
    """The others are slow to hear of it: the store has to be there for them."""
    assert not Stage(model, tmp_path).play(0, name, lag_s=LAG_S)


PLACES = LAYOUTS | FSDP2_LAYOUTS


def iterate(config: dict[str, Any], early: int) -> str:
    """What this rank hears of an iteration that rank `early` does not finish; the next is whole."""
    with open_policy(config, **UNUSED) as policy:
        heard = ""
        if policy.rank == early:
            next(iter(policy.export()))
        else:
            with pytest.raises(RefitError) as error:
                dict(policy.export())
            heard = str(error.value)
        assert len(dict(policy.export())) > 2
        return heard


@pytest.mark.parametrize("name", ["DP2", "TP2", "FSDP2 x 2"])
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_leaves_an_iteration_early_fails_the_others_and_the_next_is_whole(
    ranks, model, name: str, early: int
) -> None:
    heard = ranks.run(2, iterate, policy_config(model, PLACES[name].megatron), early)
    assert f"rank {early}: it was left before its last tensor" in heard[1 - early]


def join(rank: int, world: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def joined(world: int) -> Iterator[list[OtherProcess]]:
    """Processes that are ranks, and may end."""
    processes = [OtherProcess() for _ in range(world)]
    try:
        with reserved_port() as port:
            for rank, process in enumerate(processes):
                process.call(join, rank, world, port)
            yield processes
    finally:
        for process in processes:
            process.kill()


def leave_first(config: dict[str, Any], root: Path, leaving: int, what: str) -> str:
    """What a rank hears of a call that the other does not make, because its process ends."""
    with open_policy(config, **UNUSED) as policy:
        dict(policy.export())  # both have their policies by the end of it
        if policy.rank == leaving:
            os._exit(0)
        with pytest.raises((CheckpointError, RefitError)) as error:
            dict(policy.export()) if what == "export" else policy.save_checkpoint(root)
        return str(error.value)


@pytest.mark.parametrize("what", ["export", "save"])
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("name", ["DP2", "FSDP2 x 2"])
def test_the_error_says_that_a_rank_has_left(
    model, tmp_path, name: str, what: str, leaving: int
) -> None:
    times = {"refit_timeout_s": TIMEOUT_S, "checkpoint_timeout_s": TIMEOUT_S}
    config = policy_config(model, PLACES[name].megatron, **times)
    with joined(2) as processes:
        for process in processes:
            process.begin(leave_first, config, tmp_path / "run", leaving, what)
        said = processes[1 - leaving].result()
    if leaving == 0:
        assert "the rendezvous on rank 0 has left" in said
    elif name == "DP2" or what == "save":
        assert "rank 1 has left, or was ended: look into its log" in said
    else:  # they exchange weights, and the connections of that can tell first
        assert re.search("(rank 1|a process) has left, or was ended", said)
