"""`python examples/refit/run.py`: a policy that trains on CPU ranks, and an engine next to it."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from refit.trainer import Report

HERE = Path(__file__).resolve().parent


def make_importable() -> None:
    """Make this folder the package `refit`, here and in the ranks, which get this path."""
    sys.path[0] = str(HERE.parent)
    if (HERE.parents[1] / "megatron_policy").is_dir():  # a checkout, which needs no installation
        sys.path.append(str(HERE.parents[1]))


def main(
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the trainer.")] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Its pipeline stages.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps before each refit.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Refits over each transport.")] = 2,
) -> None:
    """Teach a small model to count, and let an engine in another process generate with it."""
    make_importable()
    from megatron_policy.coordination.rendezvous import reserved_port
    from refit.task import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="refit-") as folder, reserved_port() as port:
        path = make_checkpoint(Path(folder) / "start")
        context = mp.get_context("spawn")
        ranks: list[BaseProcess] = [
            context.Process(target=rank, args=(number, tp, pp, port, path, steps, rounds))
            for number in range(tp * pp)
        ]
        for process in ranks:
            process.start()
        if not wait(ranks):
            raise typer.Exit(1)


def rank(number: int, tp: int, pp: int, port: int, path: Path, steps: int, rounds: int) -> None:
    """Run one rank; the first starts the engine and reports."""
    environment: dict[str, int | str]
    environment = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": tp * pp}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's host name need not resolve

    from megatron_policy import MegatronPolicy
    from refit.remote import RemoteEngine
    from refit.task import policy_section
    from refit.trainer import TOLERANCE, session

    logging.getLogger("megatron").setLevel(logging.ERROR)
    engine, equal = RemoteEngine(str(path)) if number == 0 else None, True
    try:
        policy = MegatronPolicy(policy_section(path, tp, pp), init_reference_model=False)
        for report in session(policy, engine, path.parent, steps, rounds):
            print(line(report), flush=True)
            equal = equal and report.difference <= TOLERANCE
        policy.shutdown()
    finally:
        if engine is not None:
            engine.close()
    if not equal:
        sys.exit("the engine does not compute what the trainer computes")


def line(report: Report) -> str:
    """A refit as one line."""
    kind = "changed" if report.sent.changed_bytes else "whole"
    return (
        f"step {report.step:>3}  loss {report.loss:.3f}  {report.transport:<19}  "
        f"{report.sent.total_bytes / 1e3:3.0f} kB {kind:<7}  "
        f"{report.seconds:.2f} s  log-probabilities within {report.difference:.0e}  "
        f"{report.right} of {len(report.continuation)} right: {report.continuation}"
    )


def wait(ranks: list[BaseProcess]) -> bool:
    """Wait for all ranks; False if one failed, in which case the others are killed."""
    try:
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks):
                break
            time.sleep(0.1)
        return all(process.exitcode == 0 for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


if __name__ == "__main__":
    typer.run(main)
