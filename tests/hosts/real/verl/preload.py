"""Imported once by the fork server of verl's ranks: a rank is a fork of a process that has imported
verl with the CPU platform, and everything of ours.
"""

import contextlib
import gc
import importlib

from tests import preload  # noqa: F401

SLOW = (
    "megatron_policy.hosts.verl.engine",
    "transformers.models.auto.modeling_auto",
    "torch.distributed.fsdp",
    "verl.trainer.ppo.core_algos",
    "verl.utils.profiler",
    "verl.workers.engine",
    "verl.workers.engine_workers",
)
for name in SLOW:
    # What fails here fails again in the rank that needs it, and is reported there.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
gc.collect()
gc.freeze()
