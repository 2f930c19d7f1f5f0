"""The driver's policy: one object for all workers, with the names of the host's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import MetricsConfig, PolicyConfig
from megatron_policy.config.layout import checked_topology
from megatron_policy.config.notes import described
from megatron_policy.config.parallel_sizes import env_vars_of
from megatron_policy.extras import require
from megatron_policy.interfaces import ColocatablePolicyInterface, GenerationInterface
from megatron_policy.interfaces.host import find_host
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.monitoring.writers import configured_writers
from megatron_policy.policy.driver_names import delegate
from megatron_policy.training.sharding import BatchDispatcher
from megatron_policy.workers.batches import BatchDriver
from megatron_policy.workers.checks import check_device
from megatron_policy.workers.cluster.group import WorkerGroup
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster
from megatron_policy.workers.records import PathLike, RecordingDriver, absolute
from megatron_policy.workers.refit_driver import RefitDriver
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

_log = logging.getLogger(__name__)

MegatronPolicyWorker = require("ray").remote(MegatronPolicyWorkerImpl)
"""The actor of each rank."""


@GenerationInterface.register
class Policy(ColocatablePolicyInterface):
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
        self._workers = WorkerGroup(
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
        self._batches = BatchDriver(
            self.config,
            self._workers,
            dispatcher,
            metrics,
            tokenizer,
            can_train=init_optimizer,
            has_reference=init_reference_model,
        )
        self._refits = RefitDriver(self._workers, metrics)
        self._records = RecordingDriver(self.config, self._workers, metrics)
        if weights_path is not None:
            self._records.follow_start()
        if _log.isEnabledFor(logging.INFO):
            _log.info("the policy is ready\n%s", self.summary())

    def __repr__(self) -> str:
        what = getattr(self, "_described", "not started")
        return f"{type(self).__name__}({what}, driver)"

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers, for calls without a method in this class."""
        return self._workers

    train = delegate("_batches", BatchDriver.train)
    dry_run = delegate("_batches", BatchDriver.dry_run)
    begin_train_step = delegate("_batches", BatchDriver.begin_train_step)
    train_microbatch = delegate("_batches", BatchDriver.train_microbatch)
    finish_train_step = delegate("_batches", BatchDriver.finish_train_step)
    abort_train_step = delegate("_batches", BatchDriver.abort_train_step)
    get_logprobs = delegate("_batches", BatchDriver.get_logprobs)
    get_reference_policy_logprobs = delegate("_batches", BatchDriver.get_reference_policy_logprobs)
    get_topk_logits = delegate("_batches", BatchDriver.get_topk_logits)
    get_entropy = delegate("_batches", BatchDriver.get_entropy)
    get_values = delegate("_batches", BatchDriver.get_values)
    score = delegate("_batches", BatchDriver.score)
    generate = delegate("_batches", BatchDriver.generate)
    prepare_for_training = delegate("_batches", BatchDriver.prepare_for_training)
    finish_training = delegate("_batches", BatchDriver.finish_training)
    prepare_for_lp_inference = delegate("_batches", BatchDriver.prepare_for_lp_inference)
    finish_inference = delegate("_batches", BatchDriver.finish_inference)
    prepare_for_generation = delegate("_batches", BatchDriver.prepare_for_generation)
    finish_generation = delegate("_batches", BatchDriver.finish_generation)
    offload_before_refit = delegate("_batches", BatchDriver.offload_before_refit)
    offload_after_refit = delegate("_batches", BatchDriver.offload_after_refit)
    offload_to_cpu = delegate("_batches", BatchDriver.offload_to_cpu)
    get_free_memory_bytes = delegate("_batches", BatchDriver.get_free_memory_bytes)
    refit = delegate("_refits", RefitDriver.refit)
    begin_refit = delegate("_refits", RefitDriver.begin_refit)
    finish_refit = delegate("_refits", RefitDriver.finish_refit)
    probe = delegate("_refits", RefitDriver.probe)
    prepare_refit_info = delegate("_refits", RefitDriver.prepare_refit_info)
    prepare_info_for_collective = delegate("_refits", RefitDriver.prepare_info_for_collective)
    get_refit_addresses = delegate("_refits", RefitDriver.get_refit_addresses)
    stream_weights_via_ipc_zmq = delegate("_refits", RefitDriver.stream_weights_via_ipc_zmq)
    prepare_weights_for_ipc = delegate("_refits", RefitDriver.prepare_weights_for_ipc)
    get_weights_ipc_handles = delegate("_refits", RefitDriver.get_weights_ipc_handles)
    get_refit_manifest = delegate("_refits", RefitDriver.get_refit_manifest)
    init_collective = delegate("_refits", RefitDriver.init_collective)
    get_refit_secret = delegate("_refits", RefitDriver.get_refit_secret)
    broadcast_weights_for_collective = delegate(
        "_refits", RefitDriver.broadcast_weights_for_collective
    )
    export_hf = delegate("_records", RecordingDriver.export_hf)
    export_peft = delegate("_records", RecordingDriver.export_peft)
    save_checkpoint = delegate("_records", RecordingDriver.save_checkpoint)
    load_checkpoint = delegate("_records", RecordingDriver.load_checkpoint)
    get_load_report = delegate("_records", RecordingDriver.get_load_report)
    finalize_async_save = delegate("_records", RecordingDriver.finalize_async_save)
    summary = delegate("_records", RecordingDriver.summary)
    report = delegate("_records", RecordingDriver.report)
    write_metrics = delegate("_records", RecordingDriver.write_metrics)
    start_gpu_profiling = delegate("_records", RecordingDriver.start_gpu_profiling)
    stop_gpu_profiling = delegate("_records", RecordingDriver.stop_gpu_profiling)
    profile = delegate("_records", RecordingDriver.profile)

    def shutdown(self) -> bool:
        """End all workers once a running save and a refit under way are complete; return whether
        their processes are gone. Can be called again. If one of them fails, or a worker dies during
        it, raise CheckpointError, RefitError or WorkerError; the workers are ended anyway.
        """
        try:
            try:
                self._refits.close()
            finally:
                self._records.close()
        finally:
            gone = self._workers.shutdown()
        return gone

    def __del__(self) -> None:
        group = getattr(self, "_workers", None)
        if group is not None and not sys.is_finalizing():
            group.kill()
