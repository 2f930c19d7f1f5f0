"""A policy's weights outside: exports, and refits of engines."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import SEND_WEIGHTS
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.refit.delivery import Transport, deliver
from megatron_policy.refit.exporter import Exporter, stream_tensors
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.transports.disk import (
    DEFAULT_MAX_SHARD_BYTES,
    HfDirectory,
    export_directory,
)
from megatron_policy.refit.transports.peft import PeftDirectory


class WeightExports:
    """The methods of a policy that send or write its weights; they change nothing of it."""

    config: PolicyConfig
    exporter: Exporter
    memory: DeviceMemory
    steps: int
    _engine: TrainingEngine
    _metrics: MetricsLog

    def export_hf(
        self,
        path: str | PathLike[str],
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face checkpoint, in the dtypes of `config.model_name`. The directory
        appears only when complete; an existing one is refused unless `overwrite`.
        """
        self.memory.ready("export_hf()", SEND_WEIGHTS)
        source = self.config.model_name
        transport = HfDirectory(path, source, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
        export_directory(transport, self.exporter, self.steps)

    def export_peft(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the adapters as a directory that `peft.PeftModel.from_pretrained` loads. It
        appears only when complete; an existing one is refused unless `overwrite`. ConfigError
        without adapters, or where `path` is taken; ExportError, on every rank, if rank 0 cannot
        write.
        """
        self.memory.ready("export_peft()", SEND_WEIGHTS)
        exporter = self.exporter.select(adapters=True)
        export_directory(PeftDirectory(path, overwrite=overwrite), exporter, self.steps)

    def export(
        self, dtype: torch.dtype | None = None, *, adapters: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights as Hugging Face tensors by name, in turn, on every rank's device, in the
        checkpoint's dtypes unless `dtype` is given; with `adapters` those alone, by PEFT's names.
        Iterate to the end: the other ranks do.
        """
        self.memory.ready("export()", SEND_WEIGHTS)
        exporter = self.exporter.select(adapters=adapters)
        stream = stream_tensors(exporter, exporter.plan(dtype=dtype))
        return self.memory.during("export()", SEND_WEIGHTS, stream)

    def refit(self, transport: Transport, *, adapters: bool = False) -> RefitManifest:
        """Send the weights to an engine, merged with adapters if there are any, or the `adapters`
        alone, by PEFT's names; a transport sends one of them, always the same. Returns what this
        rank sent and how fast. RefitError, on every rank, if any rank's engine refused or did not
        answer in time; the policy stays usable.
        """
        self.memory.ready("refit()", SEND_WEIGHTS)
        sent = deliver(self.exporter.select(adapters=adapters), transport, self.steps)
        self._metrics.sent(sent)
        return sent
