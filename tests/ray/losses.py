"""A loss function that never ends, as only a test wants it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from megatron_policy.interfaces import LossType
from tests.losses import TokenNLL


class Troubled:
    """Takes as long as a step that is stuck, and leaves a mark of each process that is in it; stops
    its process on rank `stop_on`.
    """

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, marks: Path, stop_on: int | None = None) -> None:
        self.marks, self.stop_on = marks, stop_on

    def __call__(self, next_token_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rank = int(os.environ["RANK"])
        (self.marks / f"{rank}-{os.getpid()}").touch()
        if rank == self.stop_on:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)


class Slow(TokenNLL):
    """Holds Python's lock for `seconds` in its first call in a process, so that no thread of Python
    runs there meanwhile; on rank `only_on`, or on all.
    """

    def __init__(self, seconds: int, only_on: int | None = None) -> None:
        self.left, self.only_on = seconds, only_on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seconds, self.left = self.left, 0
        if self.only_on in (None, int(os.environ["RANK"])):
            ctypes.PyDLL(None).sleep(seconds)
        return super().__call__(*args, **kwargs)
