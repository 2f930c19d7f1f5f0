"""`python examples/quickstart/run.py`: SFT and GRPO of a small model on two CPU workers."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent


def make_importable() -> None:
    """Make this folder the package `quickstart`, here and in the workers, which get this path."""
    sys.path[0] = str(HERE.parent)
    if (HERE.parents[1] / "megatron_policy").is_dir():  # a checkout, which needs no installation
        sys.path.append(str(HERE.parents[1]))


def main(
    model: Annotated[
        str | None, typer.Option(help="A checkpoint or hub id to start from instead of a new one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, problems and sampling.")] = 0,
    sft_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of SFT.")] = 600,
    steps: Annotated[int, typer.Option(min=1, help="Steps of GRPO.")] = 120,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Of these, how many share one model.")] = 2,
    engine: Annotated[
        str,
        typer.Option(help="What trains: 'megatron' or 'fsdp2' (over all workers)."),
    ] = "megatron",
    rollouts: Annotated[
        str, typer.Option(help="What samples for GRPO: 'policy', or 'vllm', which follows it.")
    ] = "policy",
    output: Annotated[Path, typer.Option(help="Where results go.")] = Path("outputs/quickstart"),
) -> None:
    """Teach a small model to sort letters: first from careless demonstrations, then by GRPO."""
    console = Console(highlight=False)
    console.print("[bold]GRPO quickstart[/bold]: loading libraries ...")
    make_importable()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from quickstart.errors import exit_on_errors, exit_on_missing

    with exit_on_missing(console):
        from quickstart import demo, report, settings
        from quickstart.display import Display
        from quickstart.journal import Journal
        from quickstart.task import Problems

    if engine not in list(settings.Engine):
        known = " or ".join(settings.Engine)
        raise typer.BadParameter(f"{engine!r} is not an engine: give {known}")
    if rollouts not in ("policy", "vllm"):
        raise typer.BadParameter(f"{rollouts!r} cannot sample: give policy or vllm")
    options = demo.Options(
        model=model,
        seed=seed,
        imitation=replace(settings.Imitation(), steps=sft_steps),
        grpo=replace(settings.GRPO(), steps=steps),
        layout=settings.Layout(workers, tp, settings.Engine(engine)),
        output=output,
        vllm=rollouts == "vllm",
    )
    display, problems = Display(console), Problems(seed)
    with exit_on_errors(console), Journal(output / "metrics.jsonl") as journal:
        outcome = demo.run(options, problems, display, journal)
    report.conclude(options, problems, outcome, display, journal)
    if not outcome.check.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
