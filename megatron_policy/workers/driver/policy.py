"""The driver's policy: dispatches batches to the workers and joins their results.

Each base class `Driver...` has the methods of one subject, in its own module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.adapters import model_tables
from megatron_policy.config.described import described
from megatron_policy.config.layout import checked_topology
from megatron_policy.config.parallel_sizes import env_vars_of
from megatron_policy.coordination.authenticated_connection import new_secret
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces import ColocatablePolicyInterface, GenerationInterface
from megatron_policy.interfaces.host import find_host
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.packing.microbatch import ROUTED_EXPERTS
from megatron_policy.training.replay import NOT_RECORDED, Replay
from megatron_policy.training.sharding import BatchDispatcher, merged_training
from megatron_policy.workers.checks import check_device
from megatron_policy.workers.cluster.group import WorkerGroup
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster
from megatron_policy.workers.driver.accumulation import DriverAccumulation
from megatron_policy.workers.driver.checkpoint import DriverCheckpoint, absolute
from megatron_policy.workers.driver.memory import DriverMemory
from megatron_policy.workers.driver.monitoring import DriverMonitoring, of_workers
from megatron_policy.workers.driver.refit import DriverRefit
from megatron_policy.workers.profiling import DriverProfiling

if TYPE_CHECKING:
    from megatron_policy.interfaces import LossFunction
    from megatron_policy.training.dry_run import DryRun

PathLike = str | os.PathLike[str]


class Policy(
    DriverProfiling,
    DriverCheckpoint,
    DriverRefit,
    DriverMemory,
    DriverAccumulation,
    DriverMonitoring,
    ColocatablePolicyInterface,
    GenerationInterface,
):
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
        self._open_metrics(writers)
        self._tokenizer = tokenizer
        self._can_train, self._has_reference = init_optimizer, init_reference_model
        table, _ = model_tables(self.config, reference=init_reference_model)
        architecture, ranks = table.architecture, cluster.size_of(workers_per_node)
        self.topology = checked_topology(self.config, architecture, ranks, planned=True)
        self._dispatcher = BatchDispatcher.of(self.config, self.topology, architecture)
        self._described = described(self.config, table, self.topology)
        check_device(self.config, cluster.use_gpus)
        self._workers = WorkerGroup(
            cluster,
            find_host("ray").actor_class(),
            self.topology,
            kwargs={
                "config": of_workers(self.config),
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
        self._refit_secret = new_secret()
        self._start_monitoring(None if weights_path is None else self.get_load_report())

    def __repr__(self) -> str:
        what = getattr(self, "_described", "not started")
        return f"{type(self).__name__}({what}, driver)"

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers, for calls without a method in this class."""
        return self._workers

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per global batch of `gbs` rows of `data`, in microbatches of `mbs`.

        Both default to the config's; microbatches of tokens need no `mbs`. Returns a
        `TrainResult`, with the microbatches of all ranks. `eval_mode` computes the loss only.
        """
        if not (eval_mode or self._can_train):
            raise ConfigError(
                "made with init_optimizer=False, this policy only trains in eval_mode"
            )
        gbs = gbs or self.config.train_global_batch_size
        mbs = mbs or self.config.train_micro_batch_size
        shards = self._dispatcher.to_train(_batch(data), loss_fn, gbs, mbs)
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs}
        result = merged_training(self._workers.run_sharded("train", data=shards, **options))
        return self._trained(result, eval_mode)

    def dry_run(self, data: Mapping[str, Any], loss_fn: LossFunction) -> DryRun:
        """Try a loss on the first rows of `data` before training; see `MegatronPolicy.dry_run`."""
        few, rows = self._dispatcher.to_dry_run(_batch(data), loss_fn)
        found: DryRun = self._workers.run_all("dry_run", data=few, loss_fn=loss_fn)[0]
        return replace(found, rows=tuple(rows))

    def get_logprobs(
        self, data: Mapping[str, Any], return_routed_experts: bool = False
    ) -> BatchedDataDict:
        """`logprobs` fp32 [B, S]: of each token given the preceding ones; 0 at position 0. On
        request also `routed_experts`, see `MegatronPolicy.logprobs`.
        """
        if not return_routed_experts:
            return self._ask("get_logprobs", data, Replay.REQUIRED)
        return self._ask("get_logprobs", data, Replay.IF_GIVEN, return_routed_experts=True)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs` fp32 [B, S], under the weights the policy started from."""
        if not self._has_reference:
            raise ConfigError("made with init_reference_model=False, this policy has no reference")
        size = {"micro_batch_size": micro_batch_size}
        return self._ask("get_reference_policy_logprobs", data, Replay.NEVER, **size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`topk_logits` fp32 and `topk_indices` int64, both [B, S, k], largest first."""
        options = {"k": k, "micro_batch_size": micro_batch_size}
        return self._ask("get_topk_logits", data, Replay.IF_GIVEN, **options)

    def get_entropy(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`entropy` fp32 [B, S], in nats, of each token's distribution; 0 at position 0."""
        size = {"micro_batch_size": micro_batch_size}
        return self._ask("get_entropy", data, Replay.IF_GIVEN, **size)

    def get_values(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`values` fp32 [B, S]: what a scalar head makes of the tokens up to each position; 0
        beyond `input_lengths`.
        """
        size = {"micro_batch_size": micro_batch_size}
        return self._ask("get_values", data, Replay.IF_GIVEN, **size)

    def score(self, data: Mapping[str, Any]) -> BatchedDataDict:
        """`scores` fp32 [B]: what a scalar head makes of each row."""
        return self._ask("score", data, Replay.IF_GIVEN)

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Continue right-padded prompts `input_ids` [B, S], `input_lengths` [B]; see
        `GenerationOutputSpec` for the result.
        """
        sharded = self._dispatcher.to_generate(_batch(data))
        answers = self._workers.run_sharded("generate", data=sharded.shards, greedy=greedy)
        pad_id = getattr(self._tokenizer, "pad_token_id", None) or 0
        return sharded.restored(answers, {"output_ids": pad_id})

    def export_hf(
        self, path: PathLike, *, max_shard_bytes: int | None = None, overwrite: bool = False
    ) -> None:
        """Write a Hugging Face checkpoint; see `MegatronPolicy.export_hf`.

        Every rank writes its part, so `path` must be on storage that all nodes share. The policy
        remains usable after an ExportError.
        """
        options = {"max_shard_bytes": max_shard_bytes, "overwrite": overwrite}
        self._workers.run_all("export_hf", path=os.path.abspath(path), **options)

    def export_peft(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write the adapters as PEFT does; see `MegatronPolicy.export_peft`. Rank 0 writes."""
        self._workers.run_all("export_peft", path=os.path.abspath(path), overwrite=overwrite)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Move the weights that the policy generates with to the devices; return True."""
        self._workers.run_all("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Return True; there is nothing to clean up after generation."""
        return True

    def shutdown(self) -> bool:
        """End all workers once a running save is complete; return whether their processes are gone.
        Can be called again. If that save fails, or a worker dies during it, raise CheckpointError
        or WorkerError; the workers are ended anyway.
        """
        try:
            self._drain_saves()
        finally:
            self._metrics.close()
            gone = self._workers.shutdown()
        return gone

    def __del__(self) -> None:
        group = getattr(self, "_workers", None)
        if group is not None and not sys.is_finalizing():
            group.kill()

    def _ask(
        self, method: str, data: Mapping[str, Any], replay: Replay, **kwargs: Any
    ) -> BatchedDataDict:
        sharded = self._dispatcher.to_score(_batch(data), replay)
        answers = self._workers.run_sharded(method, data=sharded.shards, **kwargs)
        return sharded.restored(answers, {ROUTED_EXPERTS: NOT_RECORDED})


def _batch(data: Mapping[str, Any]) -> BatchedDataDict:
    if not isinstance(data, Mapping):
        raise ConfigError(f"data is a {type(data).__name__}; pass a BatchedDataDict")
    return data if isinstance(data, BatchedDataDict) else BatchedDataDict(data)
