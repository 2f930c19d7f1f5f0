"""The host's own scripts, as its users start them, with the laptop's configurations of
examples/nemo_rl, on two GPUs that exist in Ray's books only.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from tests.hosts.real.host import newer
from tests.ranks import ROOT

LAPTOP = ROOT / "examples/nemo_rl/laptop"
LIMIT_S = 1200.0
Script = Callable[..., str]


def checkout() -> Path:
    """The host's own tree, which has the scripts."""
    spec = importlib.util.find_spec("nemo_rl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """`script(name, file, *arguments)` runs a script of the host's to its end; what it printed."""
    tiny, host = tmp_path_factory.mktemp("tiny"), checkout()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(host)]),
        "NEMO_RL": str(host),
        "TINY": str(tiny),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("RAY_ADDRESS", None)
    prepare = [sys.executable, "-m", "examples.nemo_rl.prepare", str(tiny)]
    # The host has a package `examples` too.
    alone = env | {"PYTHONPATH": str(ROOT)}
    subprocess.run(prepare, cwd=ROOT, env=alone, check=True, timeout=LIMIT_S)
    with reserved_port() as port:
        pass
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1", "--num-gpus=2", "--num-cpus=16"),
        *("--include-dashboard=false", f"--temp-dir={tmp_path_factory.mktemp('r')}"),
    ]
    ray = subprocess.Popen(command, env=env, start_new_session=True)

    def run(name: str, file: str, *arguments: str) -> str:
        words = ["run", f"examples/{name}", "--config", str(LAPTOP / file), *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_policy", *words],
            cwd=host,
            env=env | {"RAY_ADDRESS": f"127.0.0.1:{port}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert "megatron_policy.hosts.nemo_rl.worker.MegatronPolicyWorker" in done.stdout
        return done.stdout

    try:
        yield run
    finally:
        os.killpg(ray.pid, signal.SIGTERM)
        ray.wait(60)


def saved(out: Path) -> list[str]:
    """The steps that are complete, each with weights and the optimizer's state."""
    steps = sorted(out.glob("step_*"), key=lambda each: int(each.name.removeprefix("step_")))
    for step in steps:
        for part in ("weights", "optimizer"):
            assert list((step / "policy" / part).glob("iter_*")), f"{step} has no {part}"
    return [step.name for step in steps]


def test_sft_runs_three_steps_saves_and_goes_on(script: Script, tmp_path: Path) -> None:
    where = f"checkpointing.checkpoint_dir={tmp_path}"
    script("run_sft.py", "sft.yaml", where)
    assert saved(tmp_path) == ["step_3"]
    said = script("run_sft.py", "sft.yaml", where, "sft.max_num_steps=5")
    assert "Step 4/5" in said and "Step 3/5" not in said
    assert saved(tmp_path)[-1] == "step_5"


def test_dpo_runs_three_steps_and_saves(script: Script, tmp_path: Path) -> None:
    script("run_dpo.py", "dpo.yaml", f"checkpointing.checkpoint_dir={tmp_path}")
    assert saved(tmp_path) == ["step_3"]


def test_grpo_runs_three_steps_with_rollouts_of_the_policy(script: Script, tmp_path: Path) -> None:
    if newer():
        pytest.skip("this NeMo RL asks an engine of Megatron's to generate, which is not supported")
    script("run_grpo_math.py", "grpo.yaml", f"checkpointing.checkpoint_dir={tmp_path}")
    assert saved(tmp_path) == ["step_3"]
