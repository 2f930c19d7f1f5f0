"""Many refits of one real vLLM, with a training step before each:

    VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m tests.soak.vllm_refits 100

counts, for each transport, those that fail and those after which the engine does not compute what
the policy does, and fails if the memory of one side grows in the last half of them by more than
`LIMITS` allow: what a process leaks it leaks in every refit, and what its allocator keeps it has
had before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.errors import RefitError
from tests.checkpoints import make_checkpoint
from tests.exact import ROOM
from tests.memory_use import read_memory
from tests.ranks import RankPool
from tests.vllm.engines import EngineCaller, EngineError, EngineProcess, find_python, options_of
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
KIB, MIB = 2**10, 2**20

LIMITS = {"resident": 32.0 * KIB, "allocated": 4.0 * KIB, "objects": 64.0, "keys": 0.1}
"""By how much of each a side may grow in a refit, on average over the last half of them: the memory
that the system says it has; the memory that is in use; blocks of Python's, each of some 64 bytes;
keys in the stores that it serves.
"""

HEAD = """\
| transport | refits | failed | wrong | largest difference | engine: MiB | a refit, KiB (in use) \
| trainer: MiB | a refit, KiB (in use) | seconds |
|---|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Outcome:
    """What was seen after each refit."""

    transport: str
    failures: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """The largest of any log-probability of the fixed rows, from the policy's to the engine's."""
    rounding: float = 0.0
    used: dict[str, dict[str, array[int]]] = field(default_factory=dict)
    """What each side has and uses, by the names of `LIMITS`: in arrays, which are no objects."""
    seconds: float = 0.0

    @property
    def tolerance(self) -> float:
        """Both are as far from the truth as rounding allows."""
        return 2 * ROOM * self.rounding

    @property
    def wrong(self) -> int:
        """After how many refits the engine computed something else."""
        return sum(not each <= self.tolerance for each in self.differences)

    def add(self, side: str, used: dict[str, int]) -> None:
        """Add what it has and uses after a refit."""
        for what, size in used.items():
            self.used.setdefault(side, {}).setdefault(what, array("q")).append(size)

    def growing(self) -> list[str]:
        """What grows by more than it may, in words."""
        return [
            f"{self.transport}: {what} of the {side} {grown:+.1f} a refit, at most {LIMITS[what]:g}"
            for side, used in self.used.items()
            for what, taken in used.items()
            if (grown := _growth(taken)) > LIMITS[what]
        ]

    def row(self) -> str:
        """A row below `HEAD`."""
        count = len(self.differences) + len(self.failures)
        far = f"{max(self.differences, default=0.0):.1e} of {self.tolerance:.1e}"
        cells = [self.transport, count, len(self.failures), self.wrong, far]
        for used in self.used.values():
            taken = used["resident"]
            cells.append(f"{taken[len(taken) // 2] / MIB:.1f} to {taken[-1] / MIB:.1f}")
            grown, in_use = (_growth(used[what]) / KIB for what in ("resident", "allocated"))
            cells.append(f"{grown:+.1f} ({in_use:+.1f})")
        cells.append(f"{self.seconds / max(count, 1):.2f}")
        return f"| {' | '.join(map(str, cells))} |"


def _growth(taken: array[int]) -> float:
    """By how much it grows in a refit: the slope of the line through the last half of them."""
    sizes = torch.tensor(taken[len(taken) // 2 :]).double()
    times = torch.arange(len(sizes)).double()
    times -= times.mean()
    return float((times * sizes).sum() / (times * times).sum())


def _of_trainer(session: Session) -> dict[str, int]:
    keys = dist.distributed_c10d._get_default_store().num_keys()
    if session.group is not None and session.group.member is not None:
        keys += session.group.member._store.count()
    return read_memory() | {"keys": keys}


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
                seen.add("engine", engine.call("workers", "refit_memory")[0])
                seen.add("trainer", _of_trainer(session))
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
    chosen = options.parse_args()
    if chosen.count < 4:
        options.error("the last half decides what grows: at least 4 refits")
    if find_python() is None:
        sys.exit("vLLM's environment is missing: make vllm-env, or VLLM_PYTHON=/its/python")
    # Or torch keeps the last 2,000 collectives of each process, for who asks after a hang: in the
    # first hundred refits that is all that grows.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    faults: list[str] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for outcome in soak(chosen.transport or TRANSPORTS, chosen.count, Path(folder)):
            print(outcome.row(), flush=True)
            faults += [f"{outcome.transport}, refit {each}" for each in outcome.failures]
            faults += [f"{outcome.transport}: {outcome.wrong} wrong"] if outcome.wrong else []
            faults += outcome.growing()
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
