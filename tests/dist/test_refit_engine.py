"""The engine of examples/refit, a process of its own, follows a policy over every transport."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.refit.remote import EngineError, RemoteEngine
from examples.refit.task import PROMPT, VOCAB, make_checkpoint, policy_section
from examples.refit.trainer import DELTAS, TOLERANCE, TRANSPORTS, Report, session
from megatron_policy import MegatronPolicy
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform

TIMEOUT_S = 60.0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "refit" / "run.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("refit-engine") / "start")


def follow(path: Path) -> dict[str, Any]:
    """Rank 0's view of a session with an engine."""
    prepare_platform()
    join_process_group(TIMEOUT_S)
    policy = MegatronPolicy(policy_section(path, 2, 1), init_reference_model=False)
    engine, seen = RemoteEngine(str(path), TIMEOUT_S) if policy.rank == 0 else None, {}
    try:
        if engine is not None:
            seen["before"] = engine.call("generate", PROMPT, 10)
        return seen | {"reports": list(session(policy, engine, path.parent, steps=2, rounds=2))}
    finally:
        if engine is not None:
            engine.close()
        policy.shutdown()


def test_an_engine_follows_a_policy_that_trains_over_every_transport(ranks, path: Path) -> None:
    seen, other = ranks.run(2, follow, path)
    reports: list[Report] = seen["reports"]
    assert other == {"reports": []}
    assert [report.transport for report in reports] == [t for t in TRANSPORTS for _ in range(2)]
    assert [report.step for report in reports] == list(range(2, 30, 2))
    for first, second in zip(reports[::2], reports[1::2], strict=True):
        assert not first.sent.changed_bytes
        assert bool(first.sent.why_whole) == bool(second.sent.changed_bytes)
        assert bool(second.sent.changed_bytes) == (second.transport in DELTAS)
        if second.transport in DELTAS:
            assert second.sent.total_bytes < first.sent.total_bytes / 2
    for report in reports:
        assert report.difference <= TOLERANCE, report
        assert set(report.continuation) <= set(range(VOCAB)), report
    counted = [replace(reports[0], continuation=seen["before"]), *reports]
    assert counted[0].continuation != reports[-1].continuation
    assert counted[0].right < reports[-1].right, [report.continuation for report in counted]


def test_an_engine_without_megatron_refuses_another_model_and_its_death_is_no_wait(
    path: Path,
) -> None:
    engine = RemoteEngine(str(path), TIMEOUT_S)
    modules = set(engine.call("modules"))
    assert "transformers" in modules and not modules & {"megatron", "ray"}
    with pytest.raises(EngineError, match=r"ValueError.* the trainer has model\.norm\.weight"):
        engine.call("expect", {"model.norm.weight": ((65,), torch.float32)})
    engine._process.kill()
    with pytest.raises(EngineError, match="the engine died, status -9"):
        engine.call("generate", PROMPT, 1)
    engine.close()


@pytest.mark.nightly
def test_the_example_runs_as_it_is_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "1", "--rounds", "1", "--tp", "1"],
        cwd=tmp_path,
        text=True,
        timeout=600,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    steps = range(1, 1 + len(TRANSPORTS))
    assert [line[: len("step   1")] for line in lines] == [f"step {n:>3}" for n in steps]
    assert not list(tmp_path.iterdir())
