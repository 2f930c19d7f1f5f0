"""Many refits of one real vLLM, with a training step before each:

    VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m tests.soak.vllm_refits 100

counts, for each transport, those that fail and those after which the engine does not compute what
the policy does, and measures by how much the memory of both sides grows from refit to refit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.errors import RefitError
from tests.checkpoints import make_checkpoint
from tests.exact import ROOM
from tests.ranks import RankPool
from tests.vllm.engines import EngineCaller, EngineError, EngineProcess, find_python, options_of
from tests.vllm.extension import resident_bytes
from tests.vllm.sessions import (
    FIXED,
    LAYOUTS,
    LENGTH,
    SIZES,
    TRANSPORTS,
    Session,
    make_config,
)
from tests.vllm.trainers import exact_of

LAYOUT = "tp2"
MIB = 2**20


@dataclass
class Outcome:
    """What was seen after each refit."""

    transport: str
    failures: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """The largest of any log-probability of the fixed rows, from the policy's to the engine's."""
    rounding: float = 0.0
    engine_bytes: list[int] = field(default_factory=list)
    trainer_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tolerance(self) -> float:
        """Both are as far from the truth as rounding allows."""
        return 2 * ROOM * self.rounding

    @property
    def wrong(self) -> int:
        """After how many refits the engine computed something else."""
        return sum(not each <= self.tolerance for each in self.differences)

    def line(self, warm_up: int) -> str:
        """All of it, in words; memory after that many refits."""
        count = len(self.differences) + len(self.failures)
        memory = [
            f"{name} {_growth(of[warm_up:])}"
            for name, of in (("engine", self.engine_bytes), ("trainer", self.trainer_bytes))
        ]
        words = "".join(f"\n  {failure}" for failure in self.failures)
        return (
            f"{self.transport}: {len(self.failures)} of {count} failed, {self.wrong} wrong, "
            f"largest difference {max(self.differences, default=0.0):.1e} of {self.tolerance:.1e}, "
            f"{', '.join(memory)}, {self.seconds / max(count, 1):.2f} s each{words}"
        )


def _growth(taken: list[int]) -> str:
    """From first to last, and the slopes of the lines through each half: what is a leak goes on."""
    if len(taken) < 4:
        return "not measured"
    half = len(taken) // 2
    slopes = ", ".join(f"{_slope(part) / 1024:+.1f}" for part in (taken[:half], taken[half:]))
    return f"{taken[0] / MIB:.1f} to {taken[-1] / MIB:.1f} MiB ({slopes} KiB a refit in each half)"


def _slope(taken: list[int]) -> float:
    times, sizes = torch.arange(len(taken)).double(), torch.tensor(taken).double()
    times = times - times.mean()
    return float((times * sizes).sum() / (times * times).sum())


def play(address: str, path: Path, transport: str, count: int, folder: Path) -> Outcome | None:
    """What each rank of the policy runs; rank 0 has seen it."""
    config = make_config(LAYOUT, path, adapters=transport == "adapters")
    policy = MegatronPolicy(config, init_reference_model=False)
    seen = Outcome(transport)
    rows = BatchedDataDict(
        input_ids=torch.tensor(FIXED), input_lengths=torch.full((len(FIXED),), LENGTH)
    )
    try:
        with EngineCaller(address) if policy.rank == 0 else nullcontext() as engine:
            session = Session(policy, engine, 1, folder)
            session.prepare(staged=False, base=transport == "adapters")
            for number in range(count):
                session.train()
                began = time.monotonic()
                try:
                    session.hand_over(transport)
                except (RefitError, EngineError) as error:
                    seen.failures.append(f"{number}: {error}")
                seen.seconds += time.monotonic() - began
                own = policy.logprobs(rows)[:, 1:].cpu()
                if engine is None or len(seen.failures) > number - len(seen.differences):
                    continue
                found = torch.tensor(engine.call("logprobs", FIXED))
                seen.differences.append((found - own).abs().max().item())
                seen.engine_bytes.append(engine.call("workers", "refit_resident")[0])
                seen.trainer_bytes.append(resident_bytes())
            policy.export_hf(folder / "end")
            session.close()
    finally:
        policy.shutdown()
    return seen if policy.rank == 0 else None


def soak(transports: Iterable[str], count: int, root: Path) -> Iterator[Outcome]:
    """`count` refits over each of these transports, one after the other into one engine."""
    path = make_checkpoint(root / "model", "qwen2", **SIZES)
    (root / "engine").mkdir()
    engine = EngineProcess(path, root / "engine", **options_of("qwen2"))
    ranks, world = RankPool(), LAYOUTS[LAYOUT][0]
    try:
        for transport in transports:
            folder = root / transport
            folder.mkdir()
            arguments: Any = (engine.address, path, transport, count, folder)
            outcome, *_ = ranks.run(world, play, *arguments, timeout=count * 60.0)
            ends = [exact_of(each, FIXED).rounding for each in (path, folder / "end")]
            outcome.rounding = min(ends)
            yield outcome
    finally:
        ranks.end()
        engine.close()


def main() -> None:
    """Every transport that is asked for."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("count", type=int, help="refits over each transport")
    options.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: all")
    options.add_argument("--warm-up", type=int, default=20, help="refits before memory counts")
    chosen = options.parse_args()
    if find_python() is None:
        sys.exit("vLLM's environment is missing: make vllm-env, or VLLM_PYTHON=/its/python")
    failed, warm_up = 0, min(chosen.warm_up, chosen.count // 2)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for outcome in soak(chosen.transport or TRANSPORTS, chosen.count, Path(folder)):
            print(outcome.line(warm_up), flush=True)
            failed += len(outcome.failures) + outcome.wrong
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
