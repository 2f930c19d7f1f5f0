"""`python examples/ppo/run.py`: a reward model, a value model, and PPO of a small policy, on CPUs.

Each of the three is a policy of this package on a worker of its own; the reference is the policy's
own. The task is that of the quickstart: sort letters.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent


def make_importable() -> None:
    """Make this folder and the quickstart packages, here and in the workers."""
    sys.path[0] = str(HERE.parent)
    if (HERE.parents[1] / "megatron_policy").is_dir():
        sys.path.append(str(HERE.parents[1]))


def main(
    seed: Annotated[int, typer.Option(min=0, help="Of weights, problems and sampling.")] = 0,
    sft_steps: Annotated[int, typer.Option(min=10, help="Steps of imitation.")] = 600,
    reward_steps: Annotated[int, typer.Option(min=1, help="Steps of the reward model.")] = 150,
    steps: Annotated[int, typer.Option(min=1, help="Steps of PPO.")] = 60,
    output: Annotated[Path, typer.Option(help="Where results go.")] = Path("outputs/ppo"),
) -> None:
    """Imitate careless demonstrations, learn what is preferred, and improve by that."""
    make_importable()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ppo.training import Run, ray_on_this_machine

    run = Run.new(output, seed)
    with ray_on_this_machine(3):
        before = run.imitate(sft_steps)
        print(f"imitation: reward {before:.3f} on held-out problems", flush=True)
        right = run.learn_preferences(reward_steps)
        print(f"the reward model ranks {right:.1%} of held-out pairs right", flush=True)
        after = run.improve(steps)
    print(f"reward on held-out problems: {before:.3f} before, {after:.3f} after PPO", flush=True)
    if right < 0.9 or after < before + 0.1:
        print("error: expected 90 % of pairs and a reward that is higher by 0.1")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
