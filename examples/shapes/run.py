"""`python examples/shapes/run.py`: a small model that sees pictures learns to count shapes."""

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
    """Make this folder and the quickstart packages, here and in the workers."""
    sys.path[0] = str(HERE.parent)
    if (HERE.parents[1] / "megatron_policy").is_dir():  # a checkout, which needs no installation
        sys.path.append(str(HERE.parents[1]))


def main(
    seed: Annotated[int, typer.Option(min=0, help="Of weights, pictures and sampling.")] = 0,
    sft_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of SFT.")] = 230,
    steps: Annotated[int, typer.Option(min=1, help="Steps of GRPO.")] = 40,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Of these, how many share one model.")] = 1,
    output: Annotated[Path, typer.Option(help="Where results go.")] = Path("outputs/shapes"),
) -> None:
    """Teach a small model to count shapes: first by demonstrations, then by GRPO."""
    console = Console(highlight=False)
    console.print("[bold]Shapes[/bold]: loading libraries ...")
    make_importable()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from quickstart.errors import exit_on_errors, exit_on_missing

    with exit_on_missing(console):
        from shapes.album import draw_album
        from shapes.checkpoint import make_checkpoint
        from shapes.codec import PictureCodec
        from shapes.task import Problems

        from quickstart import demo, report, settings
        from quickstart.display import Display
        from quickstart.journal import Journal

    options = demo.Options(
        model=None,
        seed=seed,
        imitation=replace(settings.Imitation(), steps=sft_steps, learning_rate=2e-3),
        grpo=replace(settings.GRPO(), steps=steps, learning_rate=3e-4),
        layout=settings.Layout(workers, tp),
        output=output,
    )
    display, problems = Display(console), Problems(seed)
    start = output / "start"
    with exit_on_errors(console), Journal(output / "metrics.jsonl") as journal:
        codec = PictureCodec(*make_checkpoint(start, seed))
        display.say(f"made a Qwen3-VL with random weights in {start}")
        outcome = demo.teach(options, str(start), problems, codec, display, journal)
    answers = {"after SFT": outcome.before.texts, "after GRPO": outcome.after.texts}
    draw_album(problems.held_out, answers, output / "answers.png")
    display.say(f"pictures with answers: {output / 'answers.png'}")
    report.summarise(options, outcome, display, journal)
    if not outcome.check.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
