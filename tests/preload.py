"""Imported once by the fork server: a rank is a fork of a process that has imported everything.

It leaves the server with a single thread, no process group and no GPU context: a fork copies none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

SLOW = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "pytest",
    "megatron_policy.policy.policy",
)


@cache
def _devices(interfaces: str) -> list[Any]:
    """The devices that torch would give to every group of this process, made once."""
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


def _share_devices() -> None:
    """Let all groups of a rank share gloo's devices, as gloo provides for. Torch makes new ones for
    each group, whose threads wake a hundred times a second: those of eight ranks with fifteen
    groups each took an eighth of two cores.
    """
    make = ProcessGroupGloo.__init__

    def init(
        group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._timeout = timeout
        options._threads = 2 * len(options._devices)
        make(group, store, rank, size, options)  # type: ignore[call-arg, arg-type]

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


_share_devices()
# What fails here fails again in the rank that needs it, and is reported there.
with contextlib.suppress(Exception):
    importlib.import_module("megatron_policy.engines.megatron.platform").prepare_platform()
for name in SLOW:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
gc.set_threshold(10_000, 10, 10)  # most of what ranks allocate lives as long as their models
gc.collect()
gc.freeze()  # a rank's collections look at what came after, and leave these pages shared
