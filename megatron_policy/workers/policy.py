"""The driver's policy: one object for all workers, with the names of the host's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import MetricsConfig, PolicyConfig
from megatron_policy.config.described import described
from megatron_policy.config.layout import checked_topology
from megatron_policy.config.parallel_sizes import env_vars_of
from megatron_policy.coordination.authenticated_connection import new_secret
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.extras import require
from megatron_policy.interfaces import ColocatablePolicyInterface, GenerationInterface
from megatron_policy.interfaces.host import find_host
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.monitoring.writers import configured_writers
from megatron_policy.refit.transports.collective.transport import CollectiveTransport
from megatron_policy.training.sharding import BatchDispatcher
from megatron_policy.workers.checks import check_device
from megatron_policy.workers.cluster.group import WorkerGroup
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster
from megatron_policy.workers.records import PathLike, RecordingDriver, absolute
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

if TYPE_CHECKING:
    from megatron_policy.refit.delivery import Transport
    from megatron_policy.refit.manifest import RefitInfo, RefitManifest

_log = logging.getLogger(__name__)

MegatronPolicyWorker = require("ray").remote(MegatronPolicyWorkerImpl)
"""The actor of each rank."""


class Policy(RecordingDriver, ColocatablePolicyInterface, GenerationInterface):
    """A Hugging Face checkpoint as a policy on the workers of a cluster, one rank per bundle.

    The constructor returns when every worker has loaded its part. An impossible configuration is
    refused with a ConfigError before any process starts; an error in a worker is raised here, and
    the workers are ended. Later, invalid data raise a BatchError and a failing loss a LossError,
    which name the caller's rows, and the policy remains usable; after any other error in a worker
    it is broken (see `WorkerGroup`): shut it down.

    Args:
        cluster: where the workers run; its world size and the config give the data-parallel size.
        config: a PolicyConfig or the host's mapping.
        tokenizer: anything with `pad_token_id` and `eos_token_id`; only `generate` needs one.
            Exports and checkpoints have it if it can be saved (`save_pretrained`).
        name_prefix: prefix of the workers' names in Ray.
        workers_per_node: fewer workers than the cluster has bundles, per node.
        init_optimizer: whether `train` will be called without `eval_mode`.
        weights_path: a checkpoint to resume from, as `load_checkpoint` takes it; the reference is
            still the one that the config names.
        optimizer_path: its optimizer's state.
        init_reference_model: whether `get_reference_policy_logprobs` will be called.
        writers: get the policy's metrics, as those of `config.metrics` do, in this process;
            `shutdown` closes them.

    Attributes:
        config (PolicyConfig): the checked configuration.
        topology (Topology): the layout: how many ranks there are along each of its axes.

    Batches are split over data-parallel ranks in the caller's order or, with dynamic batching and
    sequence packing, by the cost of their rows; results are in the caller's order and shape.
    Shapes: B rows, S positions.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: Any,
        name_prefix: str = "lm_policy",
        workers_per_node: int | Sequence[int] | None = None,
        init_optimizer: bool = True,
        weights_path: PathLike | None = None,
        optimizer_path: PathLike | None = None,
        init_reference_model: bool = True,
        *,
        writers: Sequence[MetricsWriter] = (),
    ) -> None:
        self.config = PolicyConfig.parse(config)
        metrics = MetricsLog([*writers, *configured_writers(self.config.metrics)])
        table, _ = bind_tables(self.config, reference=init_reference_model)
        architecture, ranks = table.architecture, cluster.size_of(workers_per_node)
        self.topology = checked_topology(self.config, architecture, ranks, planned=True)
        self._described = described(self.config, table, self.topology)
        dispatcher = BatchDispatcher.of(self.config, self.topology, architecture)
        check_device(self.config, cluster.use_gpus)
        workers = WorkerGroup(
            cluster,
            find_host("ray").actor_class(),
            self.topology,
            kwargs={
                # Writers are the driver's.
                "config": self.config.model_copy(update={"metrics": MetricsConfig()}),
                "tokenizer": tokenizer,
                "init_optimizer": init_optimizer,
                "init_reference_model": init_reference_model,
                "weights_path": absolute(weights_path),
                "optimizer_path": absolute(optimizer_path),
                "worker_sharding_annotations": self.topology,
            },
            env_vars=env_vars_of(self.config),
            name=name_prefix,
            workers_per_node=workers_per_node,
            timeout_s=self.config.worker_timeout_s,
        )
        super().__init__(
            workers,
            dispatcher,
            metrics,
            tokenizer,
            can_train=init_optimizer,
            has_reference=init_reference_model,
        )
        self._refit_secret = new_secret()
        if weights_path is not None and (loaded := self.get_load_report()):
            self._steps = loaded.step
        if _log.isEnabledFor(logging.INFO):
            _log.info("the policy is ready\n%s", self.summary())

    def __repr__(self) -> str:
        what = getattr(self, "_described", "not started")
        return f"{type(self).__name__}({what}, driver)"

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers, for calls without a method in this class."""
        return self._workers

    def refit(self, transport: Transport, *, adapters: bool = False) -> RefitManifest:
        """Send the weights, or the `adapters` alone, as `MegatronPolicy.refit` does on each worker;
        returns what all of them have sent. For a group that engines joined, call
        `broadcast_weights_for_collective`.
        """
        if isinstance(transport, CollectiveTransport):
            raise ConfigError(
                "a group's transport cannot be sent to the workers: call init_collective and "
                "broadcast_weights_for_collective"
            )
        sent = self._workers.run_all("refit", transport=transport, adapters=adapters)
        tensors = {name: each for manifest in sent for name, each in manifest.tensors.items()}
        slowest = max(manifest.seconds for manifest in sent)
        whole: RefitManifest = replace(sent[0], tensors=tensors, seconds=slowest)
        self._metrics.sent(whole)
        return whole

    def prepare_refit_info(self, with_numel: bool = False, *, adapters: bool = False) -> RefitInfo:
        """{HF name: (shape, dtype)} of all that is sent, or with the number of elements too, and
        its `model`: what engines have to set up for it. With `adapters` of those alone.
        """
        options = {"with_numel": with_numel, "adapters": adapters}
        infos: list[RefitInfo] = self._workers.run_all("prepare_refit_info", **options)
        return infos[0]

    def prepare_info_for_collective(self, *, adapters: bool = False) -> RefitInfo:
        """As `prepare_refit_info`, of what `broadcast_weights_for_collective` sends."""
        return self.prepare_refit_info(adapters=adapters)

    def get_refit_addresses(self) -> dict[str, str]:
        """{device id: ZeroMQ address} that `stream_weights_via_ipc_zmq` binds for engines."""
        devices = self._workers.run_all("report_device_id")
        return dict(zip(devices, self._workers.run_all("get_refit_address"), strict=True))

    def stream_weights_via_ipc_zmq(
        self,
        buffer_size_bytes: int | None = None,
        kv_scales: Any = None,
        *,
        adapters: bool = False,
    ) -> list[Any]:
        """Start sending all weights, or the `adapters` alone, to the engine on each worker's
        device; return Ray's futures of each worker's bytes, seconds and rate
        (`RefitManifest.speed`), which raise RefitError if one refuses.
        """
        options = {"buffer_size_bytes": buffer_size_bytes, "kv_scales": kv_scales}
        return self._workers.futures("stream_weights_via_ipc_zmq", adapters=adapters, **options)

    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None, *, adapters: bool = False
    ) -> list[list[str]]:
        """HF names in order, in groups of at most that many GiB (by default what the worker with
        the least free memory can afford); a larger tensor is a group of its own.
        """
        answers = self._workers.run_all("prepare_weights_for_ipc", adapters=adapters)
        limit = min(available for _, available in answers)
        if _refit_buffer_size_gb is not None:
            limit = _refit_buffer_size_gb * 2**30
        groups: list[list[str]] = []
        left = 0.0
        for name, nbytes in answers[0][0]:
            if not groups or nbytes > left:
                groups.append([])
                left = limit
            groups[-1].append(name)
            left -= nbytes
        return groups

    def get_weights_ipc_handles(self, keys: list[str], *, adapters: bool = False) -> dict[str, Any]:
        """{device id: handles} of these tensors, of all workers."""
        options = {"keys": keys, "adapters": adapters}
        return unite(self._workers.run_all("get_weights_ipc_handles", **options))

    def get_refit_manifest(self) -> dict[str, Any]:
        """{device id: Manifest} of what `get_weights_ipc_handles` has exported."""
        return unite(self._workers.run_all("get_refit_manifest"))

    def init_collective(
        self,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
        **options: Any,
    ) -> list[Any]:
        """Start meeting the engines' ranks, which need `secret` (None: that of
        `get_refit_secret`); return Ray's futures. See `EngineRefits.init_collective`.
        """
        self._refit_secret = secret or self._refit_secret
        sizes = {"world_size": world_size, "train_world_size": train_world_size}
        options |= {"ip": ip, "port": port, "secret": self._refit_secret, **sizes}
        return self._workers.futures("init_collective", **options)

    def get_refit_secret(self) -> str:
        """What an engine needs to join the group of `init_collective`: made for this policy, and
        the same before and after that call.
        """
        return self._refit_secret

    def broadcast_weights_for_collective(
        self,
        kv_scales: Any = None,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
        *,
        adapters: bool = False,
    ) -> list[Any]:
        """Start sending all weights, or the `adapters` alone, to the engines that joined; return
        Ray's futures of each worker's bytes, seconds and rate (`RefitManifest.speed`), which raise
        RefitError if one refuses.
        """
        return self._workers.futures(
            "broadcast_weights_for_collective",
            kv_scales=kv_scales,
            buffer_size_bytes=buffer_size_bytes,
            num_buffers=num_buffers,
            adapters=adapters,
        )

    def shutdown(self) -> bool:
        """End all workers once a running save is complete; return whether their processes are gone.
        Can be called again. If that save fails, or a worker dies during it, raise CheckpointError
        or WorkerError; the workers are ended anyway.
        """
        try:
            if self._saves and self._workers.usable:
                self.finalize_async_save()
        finally:
            self._metrics.close()
            gone = self._workers.shutdown()
        return gone

    def __del__(self) -> None:
        group = getattr(self, "_workers", None)
        if group is not None and not sys.is_finalizing():
            group.kill()


def unite(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All workers' results by device, merged."""
    united: dict[str, Any] = {}
    for answer in answers:
        if twice := sorted(united.keys() & answer.keys()):
            raise RefitError(f"two workers report the same device: {', '.join(twice)}")
        united |= answer
    return united
