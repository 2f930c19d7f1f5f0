"""Two jobs that export onto one destination at once, one of them killed now and then:
`python -m tests.soak.exports --count 200`. What is visible there always has all its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_policy.convert import verify
from megatron_policy.coordination.rendezvous import reserved_port
from tests.other_process import OtherProcess

MODEL = {"tied": True, "layers": 2, "hidden": 32, "ffn": 64, "vocab": 251}
KILLED_EVERY = 4
"""One round of so many has a kill."""
_open: list[Any] = []  # this process's policy


def open_policy(rank: int, world: int, port: int, config: dict[str, Any], value: float) -> int:
    """Make this process's policy, all of whose weights are `value`; the process id."""
    from megatron_policy.policy import MegatronPolicy

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    policy = MegatronPolicy(config, init_optimizer=False, init_reference_model=False)
    for _, parameter in policy.named_parameters():
        parameter.detach().fill_(value)
    _open.append(policy)
    return os.getpid()


def export(path: Path) -> float:
    """Export it; how long that took."""
    started = time.monotonic()
    _open[0].export_hf(path, max_shard_bytes=20_000, overwrite=True)
    return time.monotonic() - started


class Job:
    """The ranks of one job, started anew when they were killed."""

    def __init__(self, config: dict[str, Any], world: int, value: float) -> None:
        self._config, self._world, self.value = config, world, value
        self._ranks: list[OtherProcess] = []

    def start(self) -> None:
        """Have a policy on every rank."""
        if self._ranks:
            return
        self._ranks = [OtherProcess() for _ in range(self._world)]
        with reserved_port() as port:
            for rank, process in enumerate(self._ranks):
                process.begin(open_policy, rank, self._world, port, self._config, self.value)
            for process in self._ranks:
                process.result()

    def begin(self, path: Path) -> None:
        for process in self._ranks:
            process.begin(export, path)

    def result(self) -> list[float]:
        """How long the export took on each rank; the error of one that failed."""
        return [process.result() for process in self._ranks]

    def kill(self) -> None:
        """End all ranks at once."""
        ranks, self._ranks = self._ranks, []
        for process in ranks:
            os.kill(process.pid, 9)
        for process in ranks:
            process.kill()


class Watch:
    """Looks all the time at what is visible at `path`."""

    def __init__(self, path: Path) -> None:
        self._path, self.looks, self.faults = path, 0, set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        appeared = False
        while not self._over.wait(0.0005):
            fault = self._fault(appeared)
            appeared = appeared or fault is None
            self.looks += 1
            if fault:
                self.faults.add(fault)

    def _fault(self, appeared: bool) -> str | None:
        """What is wrong there; empty where there is nothing yet, None if all is well."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return "it is gone" if appeared else ""
        try:
            names = set(os.listdir(handle))
            # Another may have its name by now: then this one is on its way out.
            if not os.path.samestat(os.fstat(handle), os.stat(self._path)):
                return None
        finally:
            os.close(handle)
        weights = {name for name in names if name.endswith(".safetensors")}
        expected = {"config.json", "megatron_policy.json", "model.safetensors.index.json"}
        total = max((int(name.split("-of-")[1][:5]) for name in weights), default=-1)
        return None if expected <= names and len(weights) == total else f"it has {sorted(names)}"


def check(path: Path, values: list[float]) -> str:
    """What is wrong with the directory; empty if it has the weights of one of the jobs."""
    from transformers import AutoModelForCausalLM

    from megatron_policy.converters.formats.hf_files import HfReader

    found = verify(path, path)
    if not found.equal:
        return "it does not have the digests it states"
    with HfReader(path) as reader:
        seen = {value for name in reader.shapes for value in reader.tensor(name).unique().tolist()}
    if len(seen) != 1 or not seen <= {*values}:
        return f"it has weights of {sorted(seen)}"
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    if missing := {file for file in index["weight_map"].values() if not (path / file).is_file()}:
        return f"it lacks {sorted(missing)}"
    model = AutoModelForCausalLM.from_pretrained(path)
    right = torch.all(next(model.parameters()) == seen.pop())
    return "" if right else "transformers reads other weights"


class Stage:
    """Two jobs and their destination."""

    def __init__(self, config: dict[str, Any], folder: Path, worlds: tuple[int, int]) -> None:
        self.jobs = [Job(config, world, number + 1.0) for number, world in enumerate(worlds)]
        self.path, self._usual_s, self._dice = folder / "exported", 0.1, random.Random(4)

    def play(self, kill: bool) -> Iterator[str]:
        """One round; what went wrong in it."""
        for job in self.jobs:
            job.start()
        victim = self._dice.choice(self.jobs) if kill else None
        for job in self._dice.sample(self.jobs, 2):
            job.begin(self.path)
        if victim:
            time.sleep(self._dice.uniform(0.0, self._usual_s))
            victim.kill()
        for job in self.jobs:
            if job is not victim:
                with _told() as said:
                    self._usual_s = max(job.result())
                yield from said
        with _told() as said:
            if fault := check(self.path, [job.value for job in self.jobs]):
                said.append(fault)
        yield from said
        left = {name for name in os.listdir(self.path.parent) if name != self.path.name}
        if left and not kill:
            yield f"left beside it: {sorted(left)}"

    def end(self) -> None:
        for job in self.jobs:
            job.kill()


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")


def soak(model: Path, folder: Path, count: int, worlds: tuple[int, int]) -> list[str]:
    """So many rounds, and what went wrong in them and in between."""
    from tests.dist.cases import policy_config
    from tests.dist.layouts import layout

    config = policy_config(model, layout(worlds[0], tp=worlds[0]).megatron)
    folder.mkdir(parents=True)
    stage, faults = Stage(config, folder, worlds), []
    try:
        with Watch(stage.path) as watch:
            for number in range(count):
                kill = number % KILLED_EVERY == KILLED_EVERY - 1 and number < count - 1
                faults += [f"round {number}: {fault}" for fault in stage.play(kill)]
    finally:
        stage.end()
    if not watch.looks:
        faults.append("nobody has looked")
    return faults + sorted(watch.faults)


def main() -> int:
    """Play as many rounds as asked for, and print what went wrong."""
    from tests.checkpoints import make_checkpoint

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="of rounds, each of two exports")
    parser.add_argument("--ranks", type=int, default=1, help="of each job")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), "qwen2", **MODEL)
        worlds = (chosen.ranks, chosen.ranks)
        faults = soak(model, Path(folder, "exports"), chosen.count, worlds)
    summary = f"exports of {chosen.ranks} rank(s): {len(faults)} faults in {chosen.count} rounds"
    print(*faults, summary, sep="\n", flush=True)
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
