"""A policy's weights outside: exports, and refits of engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

import torch

from megatron_policy.errors import ConfigError
from megatron_policy.memory.states import SEND_WEIGHTS
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.policy.session import Session
from megatron_policy.refit.arguments import check_transport
from megatron_policy.refit.delivery import Transport, deliver
from megatron_policy.refit.detached import DetachedRefits, WholeSets
from megatron_policy.refit.exporter import stream_tensors
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.transports.collective.shards import ShardRefits
from megatron_policy.refit.transports.delta_stream import DeltaShards, DeltaStream
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import (
    DEFAULT_MAX_SHARD_BYTES,
    HfDirectory,
    export_directory,
)
from megatron_policy.refit.transports.peft import PeftDirectory

Destination = Transport | DeltaDirectory | DeltaStream | ShardRefits | DeltaShards
"""To where weights are sent, and whether all of them or what has changed."""


class WeightExports:
    """Sends and writes a policy's weights, and changes nothing of them; all methods are
    collective.
    """

    def __init__(self, session: Session, metrics: MetricsLog) -> None:
        self._session, self._metrics = session, metrics
        self._detached = DetachedRefits()

    def export_hf(
        self,
        path: str | PathLike[str],
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face checkpoint, in the dtypes of `config.model_name`. The directory
        appears only when complete; an existing one is refused unless `overwrite`, and one that
        overlaps the policy's `model_name` or `reference_model_name` always: ConfigError.
        ExportError, on every rank, if one cannot write.
        """
        self._session.memory.ready("export_hf()", SEND_WEIGHTS)
        transport = HfDirectory(path, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
        export_directory(transport, self._session.exporter, self._session.state.steps)

    def export_peft(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the adapters as a directory that `peft.PeftModel.from_pretrained` loads. It
        appears only when complete; an existing one is refused unless `overwrite`. ConfigError
        without adapters, or where `path` is taken or overlaps the policy's model or reference;
        ExportError, on every rank, if rank 0 cannot write.
        """
        self._session.memory.ready("export_peft()", SEND_WEIGHTS)
        exporter = self._session.exporter.select(adapters=True)
        export_directory(
            PeftDirectory(path, overwrite=overwrite), exporter, self._session.state.steps
        )

    def export(
        self, dtype: torch.dtype | None = None, *, adapters: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights as Hugging Face tensors by name, in turn, on every rank's device, in the
        checkpoint's dtypes unless `dtype` is given; with `adapters` those alone, by PEFT's names.
        Iterate to the end: the other ranks do.
        """
        self._session.memory.ready("export()", SEND_WEIGHTS)
        exporter = self._session.exporter.select(adapters=adapters)
        stream = stream_tensors(exporter, exporter.plan(dtype=dtype))
        return self._session.memory.during("export()", SEND_WEIGHTS, stream)

    def refit(self, transport: Destination, *, adapters: bool = False) -> RefitManifest:
        """Send the weights to an engine, merged with adapters if there are any, or the `adapters`
        alone, by PEFT's names; a transport sends one of them, always the same. Returns what this
        rank sent and how fast. RefitError, on every rank, if any rank's engine refused or did not
        answer in time; the policy stays usable. One that `begin_refit` has begun is finished first.
        """
        check_transport(transport, "refit()")
        self._session.memory.ready("refit()", SEND_WEIGHTS)
        self.finish_refit()
        exporter = self._session.exporter.select(adapters=adapters)
        steps = self._session.state.steps
        if isinstance(transport, DeltaDirectory | ShardRefits | DeltaShards):
            sent = transport.deliver(exporter, steps)
        elif isinstance(transport, DeltaStream):
            sent = self._detached.deliver(exporter, transport, steps)
        else:
            sent = deliver(exporter, transport, steps)
        self._metrics.sent(sent)
        return sent

    def begin_refit(self, transport: Destination, *, adapters: bool = False) -> None:
        """Begin a refit as `refit` does, of the weights as they are now, and return when they are
        copied to host memory: training, and all else, may go on while engines receive. One that is
        under way is finished first, as by `finish_refit`. `megatron-policy plan --refit` says the
        memory. RefitError, on every rank, if one has not enough of it.
        """
        check_transport(transport, "begin_refit()")
        self._session.memory.ready("begin_refit()", SEND_WEIGHTS)
        if isinstance(transport, DeltaDirectory | ShardRefits | DeltaShards):
            raise ConfigError(
                f"{type(transport).__name__} sends while the weights stay as they are: call "
                "refit() with it, or begin_refit() with an HfDirectory or a transport"
            )
        self.finish_refit()
        exporter = self._session.exporter.select(adapters=adapters)
        source = transport if isinstance(transport, DeltaStream) else WholeSets(transport)
        self._detached.begin(exporter, source, self._session.state.steps)

    def finish_refit(self) -> RefitManifest | None:
        """Wait for the refit that `begin_refit` has begun; return what this rank sent and how fast,
        or None if none is under way. RefitError, on every rank, if it has failed: the next `refit`,
        `begin_refit`, `probe` or `shutdown` raises it if this is not called.
        """
        sent = self._detached.finish()
        if sent is not None:
            self._metrics.sent(sent)
        return sent

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Finish the refit under way before the body, which ends the policy, and leave the process
        groups of such refits after it. A failure of that refit is raised at the end: all ranks have
        it, and leave together all the same.
        """
        failure: Exception | None = None
        try:
            self.finish_refit()
        except Exception as error:  # also of what writes its figures
            failure = error
        try:
            yield
        finally:
            self._detached.close()
        if failure is not None:
            raise failure
