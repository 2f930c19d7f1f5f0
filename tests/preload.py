"""Imported once by the fork server: a rank is a fork of a process that has imported everything.

It leaves the server with a single thread, no process group and no GPU context: a fork copies none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

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


# What fails here fails again in the rank that needs it, and is reported there.
with contextlib.suppress(Exception):
    importlib.import_module("megatron_policy.engines.megatron.platform").prepare_platform()
for name in SLOW:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
gc.set_threshold(10_000, 10, 10)  # most of what ranks allocate lives as long as their models
gc.collect()
gc.freeze()  # a rank's collections look at what came after, and leave these pages shared
