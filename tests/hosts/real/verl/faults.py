"""A loss that fails in its third call. verl's SFT trainers have it by `python -m ...faults TRAINER
...`, its PPO trainer by `plugs.py`.

The loss raises, or kills its process, on the rank that TESTS_FAULT names (`raise:1`, `kill:0`).
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

import torch.distributed as dist
from verl.workers.utils import losses

MESSAGE = "a fault of the tests"
GONE = {
    "torchrun": ("SIGKILL",),
    "ray": ("ActorDiedError", "waited for another rank, which was killed, failed or hung"),
}
"""What a trainer that is started in these ways ends with when a worker is killed: the launcher's
report, or that of a rank that waits for the worker, which torchrun may end before it says so.
"""
_sound = losses.sft_loss
_calls = 0


def faulty_loss(*arguments: Any, fault: str, **keywords: Any) -> Any:
    """verl's own loss of SFT, up to the fault."""
    fail_at(fault)
    return _sound(*arguments, **keywords)


def fail_at(fault: str) -> None:
    """Called by a loss of this process: the third call fails where `fault` says."""
    global _calls
    _calls += 1
    kind, _, rank = fault.partition(":")
    if _calls == 3 and dist.get_rank() == int(rank):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(MESSAGE)


def main() -> None:
    # Not those of this module's main copy: workers of Ray import it by name.
    from tests.hosts.real.verl import faults

    losses.sft_loss = functools.partial(faults.faulty_loss, fault=os.environ["TESTS_FAULT"])
    importlib.import_module(sys.argv.pop(1)).main()


if __name__ == "__main__":
    main()
