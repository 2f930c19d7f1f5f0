"""Loss functions that go wrong in one rank's process, as only a test wants them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from megatron_policy.interfaces import LossType


class Troubled:
    """Raises on rank `raise_on`; elsewhere it takes as long as a step that is stuck."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, marks: Path, raise_on: int | None = None) -> None:
        self.marks, self.raise_on = marks, raise_on

    def __call__(self, next_token_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rank = int(os.environ["RANK"])
        (self.marks / f"{rank}-{os.getpid()}").touch()
        if rank == self.raise_on:
            raise ArithmeticError(f"rank {rank} cannot divide")
        time.sleep(600)
