"""The first phase: learn from demonstrations, including the careless ones."""

from __future__ import annotations

from collections.abc import Callable

from megatron_policy import Policy

from .codec import Codec
from .losses import ImitationLoss
from .settings import Imitation
from .task import Questions

Report = Callable[[dict[str, float]], None]


def imitate(
    policy: Policy, problems: Questions, codec: Codec, settings: Imitation, report: Report
) -> None:
    """Train for `settings.steps` steps on fresh demonstrations; `report` gets each step's loss."""
    done = 0
    while done < settings.steps:
        steps = min(settings.steps_per_call, settings.steps - done)
        shown = problems.draw(steps * settings.batch_size)
        batch = codec.demonstrations(shown, [problems.demonstrate(each) for each in shown])
        result = policy.train(batch, ImitationLoss())
        for loss in result["loss"].tolist():
            done += 1
            report({"step": done, "loss": loss})
