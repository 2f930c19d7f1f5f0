"""Saves, loads and exports after which rank 0 leaves at once, under `env://`, where it takes the
store along: `python -m tests.soak.saves --count 200`. Every rank has to succeed.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_policy.checkpoint.tracker import complete
from megatron_policy.coordination.rendezvous import reserved_port
from tests.rank_process import environment
from tests.ranks import ENVIRONMENT

WORLD = 2
TIMEOUT_S = 120.0
LAG_S = 0.02
UNSURE = "a rank may not know"  # what a rank logs that has lost another in the end
MODEL = {"tied": True, "layers": 2, "hidden": 32, "ffn": 64, "vocab": 251}


@dataclass(frozen=True)
class Case:
    """What the ranks do last, and how rank 0 goes then."""

    what: str
    layout: str = "DP2"
    background: bool = False
    way: str = "exit"
    """`exit`: at once, by os._exit; `return`: as at the end of a script without shutdown()."""
    lag_s: float = 0.0
    """By how much every answer of the store comes late to the other ranks, on the average."""


CASES = {
    "save, exit": Case("save"),
    "save, return": Case("save", way="return"),
    "save under TP2, exit": Case("save", "TP2"),
    "background save, exit": Case("save", background=True),
    "background save, return": Case("save", background=True, way="return"),
    "load, exit": Case("load"),
    "export() under DP2, exit": Case("iterate"),
    "export() under DP2, return": Case("iterate", way="return"),
    "export() under CP2, exit": Case("iterate", "CP2"),
    "export() under CP2, return": Case("iterate", "CP2", way="return"),
    "export_hf() under DP2, exit": Case("export"),
    "a refused export_hf(), exit": Case("refused"),
    "a memory state, exit": Case("enter"),
}
SAVES = tuple(name for name in CASES if "save" in name)
EXPORTS = tuple(name for name in CASES if "export()" in name)


def config_of(model: Path, case: Case) -> dict[str, Any]:
    from tests.dist.cases import policy_config
    from tests.dist.layouts import layout

    sizes = {"DP2": {}, "TP2": {"tp": 2}, "CP2": {"context_parallel_size": 2}}[case.layout]
    section = {"checkpoint": {"async_save": case.background}}
    megatron = {**layout(WORLD, **sizes).megatron, **section}
    times = {"checkpoint_timeout_s": TIMEOUT_S, "refit_timeout_s": TIMEOUT_S}
    return policy_config(model, megatron, **times)


def act(case: Case, config: dict[str, Any], root: Path) -> None:
    """What a rank does with its policy; it raises where anything fails."""
    from megatron_policy.errors import ConfigError
    from megatron_policy.policy import MegatronPolicy

    policy = MegatronPolicy(
        config, init_optimizer=case.what in ("save", "load"), init_reference_model=False
    )
    if case.what in ("save", "load"):
        policy.save_checkpoint(root / "run", root / "run")
        if case.way == "exit":
            policy.finalize_async_save()
    if case.what == "load":
        policy.load_checkpoint(root / "run", root / "run")
    if case.what == "iterate":
        assert len(dict(policy.export())) > 0
    if case.what == "export":
        policy.export_hf(root / "exported")
    if case.what == "enter":
        policy.memory.offload("gradients")
    if case.what == "refused":
        try:
            policy.export_hf(root)
        except ConfigError as error:
            assert "exists and is not a checkpoint" in str(error), error
        else:
            raise AssertionError("it was not refused")


def lag(seconds: float, dice: random.Random) -> None:
    """From here on this process is slow to hear of others."""

    def late(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            time.sleep(dice.uniform(0.0, 2 * seconds))
            return ask(*args)

        return asked

    for name in ("check", "get", "add"):
        setattr(dist.PrefixStore, name, late(getattr(dist.PrefixStore, name)))


def be_rank(rank: int, port: int, case: Case, config: dict[str, Any], root: Path) -> None:
    """The life of a rank; its exit code tells how it went, its log why."""
    log = os.open(root / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(TIMEOUT_S / 2, file=2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank != 0 and case.lag_s:
        lag(case.lag_s, random.Random(port))
    act(case, config, root)
    if case.way == "exit" and rank == 0:
        os._exit(0)


class Stage:
    """Plays cases in processes that fork from one which has imported everything."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])

    def play(self, number: int, name: str, lag_s: float = 0.0) -> str:
        """Why it failed; empty if it did not."""
        case, root = replace(CASES[name], lag_s=lag_s), self._folder / str(number)
        root.mkdir(parents=True)
        config = config_of(self._model, case)
        with reserved_port() as port:
            ranks = [
                self._context.Process(target=be_rank, args=(rank, port, case, config, root))
                for rank in range(WORLD)
            ]
            with environment({**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}):
                for rank in ranks:
                    rank.start()
            for rank in ranks:
                rank.join(TIMEOUT_S)
        said = [(rank, p.exitcode) for rank, p in enumerate(ranks) if p.exitcode != 0]
        heard = [(root / f"rank{rank}.log").read_text()[-3000:] for rank in range(WORLD)]
        for process in ranks:
            process.kill()
            process.join()
        if said or any(UNSURE in log for log in heard):
            return "\n".join([f"{name}: exit codes {said}", *heard])
        if case.what == "save" and len(complete(root / "run")) != 1:
            return f"{name}: all ranks succeeded, and there is no checkpoint"
        return ""


def soak(model: Path, folder: Path, names: list[str]) -> Iterator[str]:
    """Play the cases of these names, every other with a lag; the failures, in words."""
    stage = Stage(model, folder)
    for number, name in enumerate(names):
        if failure := stage.play(number, name, LAG_S * (number // len(set(names)) % 2)):
            yield failure


def dealt(count: int, names: tuple[str, ...]) -> list[str]:
    """`count` names, each as often as the others."""
    return [names[number % len(names)] for number in range(count)]


def main() -> int:
    """Play as many cases as asked for, and print what failed."""
    from tests.checkpoints import make_checkpoint

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=["saves", "exports", "others"])
    chosen = parser.parse_args()
    kinds = {"saves": SAVES, "exports": EXPORTS}
    kinds["others"] = tuple(name for name in CASES if name not in (*SAVES, *EXPORTS))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), "qwen2", **MODEL)
        for kind in chosen.kinds:
            names = dealt(chosen.count, kinds[kind])
            failures = list(soak(model, Path(folder, kind), names))
            failed += len(failures)
            print(
                *failures, f"{kind}: {len(failures)} of {len(names)} failed", sep="\n", flush=True
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
