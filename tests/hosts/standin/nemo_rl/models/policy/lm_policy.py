"""The driver's policy: deals data, and calls workers by keyword as the host's does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, packed, sharded
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

PATH = "nemo_rl.models.policy"
AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Contract:
    """What differs between releases, by name: "older" is until 0.4, "newer" the newest."""

    name: str
    worker: str
    dtensor_worker: str
    one_initializer: bool
    kills: bool


OLDER = Contract(
    "older",
    f"{PATH}.megatron_policy_worker.MegatronPolicyWorker",
    f"{PATH}.dtensor_policy_worker.DTensorPolicyWorker",
    one_initializer=False,
    kills=False,
)
NEWER = Contract(
    "newer",
    f"{PATH}.workers.megatron_policy_worker.MegatronPolicyWorker",
    f"{PATH}.workers.dtensor_policy_worker.DTensorPolicyWorker",
    one_initializer=True,
    kills=True,
)


def _sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Tensor-parallel, pipeline-parallel and context-parallel ranks."""
    megatron, dtensor = config["megatron_cfg"], config.get("dtensor_cfg", {})
    if megatron["enabled"]:
        kinds = ("tensor_model", "pipeline_model", "context")
        return tuple(megatron[f"{kind}_parallel_size"] for kind in kinds)
    return dtensor["tensor_parallel_size"], 1, dtensor["context_parallel_size"]


class Policy:
    """A policy under one contract. Batches are plain, or packed where the config says so."""

    def __init__(
        self,
        contract: Contract,
        cluster: RayVirtualCluster,
        config: dict[str, Any],
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
    ) -> None:
        self.contract, self.config = contract, config
        tp, pp, cp = _sizes(config)
        worker, given = contract.worker, {"tokenizer": tokenizer}
        if not config["megatron_cfg"]["enabled"]:
            worker = contract.dtensor_worker
            if config["dtensor_cfg"].get("_v2"):
                worker, given = worker.replace("_worker.", "_worker_v2.") + "V2", {}
        if contract is NEWER and "TORCH_CUDA_ARCH_LIST" not in os.environ:
            raise RuntimeError("TORCH_CUDA_ARCH_LIST is not set")
        world = cluster.world_size()
        self.dp = world // (tp * pp * cp)
        self.sharding = NamedSharding(np.arange(world).reshape(pp, self.dp, cp, tp), AXES)
        builder = RayWorkerBuilder(
            worker,
            config,
            **given,
            init_optimizer=True,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            init_reference_model=True,
            worker_sharding_annotations=self.sharding,
            pre_init_communication_queue="a queue, of which nobody takes",
            **({"processor": None} if contract is NEWER and given else {}),
        )
        env_vars = {"STANDIN_CONTRACT": contract.name}
        self.group = RayWorkerGroup(
            cluster, builder, self.sharding, env_vars, contract.one_initializer
        )

    def train(self, data: BatchedDataDict, loss_fn: Any, eval_mode: bool = False) -> dict[str, Any]:
        """Results as algorithms see them, and which ranks answered."""
        gbs, mbs = self.config["train_global_batch_size"], self.config["train_micro_batch_size"]
        call = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs}
        if self.contract is NEWER:
            call["check_dim_skip_keys"] = None
        answers = self.group.call_sharded(
            "train", self._dealt(data, gbs, "train_mb_tokens"), **call
        )
        metrics: dict[str, list[Any]] = {}
        for answer in answers:
            for name, values in answer["all_mb_metrics"].items():
                metrics.setdefault(name, []).extend(values)
        first = answers[0]
        return {
            "loss": first["global_loss"],
            "grad_norm": first["grad_norm"],
            "all_mb_metrics": metrics,
            "ranks": [answer["rank"] for answer in answers],
        }

    def train_in_parts(self, parts: list[BatchedDataDict], loss_fn: Any) -> dict[str, Any]:
        """One step over parts, none of which knows what the others count."""
        gbs, mbs = self.config["train_global_batch_size"], self.config["train_micro_batch_size"]
        self.call("begin_train_step", loss_fn=loss_fn, gbs=gbs, mbs=mbs)
        for part in parts:
            self.group.call_sharded(
                "train_microbatch", self._dealt(part, part.size, "train_mb_tokens")
            )
        return self.call("finish_train_step")[0]

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        return self._read("get_logprobs", data)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        return self._read("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size)

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        return self._read("get_topk_logits", data, k=k, micro_batch_size=micro_batch_size)

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """The methods that all workers are called by, alike."""
        return self.group.call_all(method, **kwargs)

    def shutdown(self) -> None:
        self.group.shutdown(kill=self.contract.kills)

    def _read(self, method: str, data: BatchedDataDict, **kwargs: Any) -> BatchedDataDict:
        dealt = self._dealt(data, data.size, "logprob_mb_tokens")
        return BatchedDataDict.joined(self.group.call_sharded(method, dealt, **kwargs))

    def _dealt(self, data: BatchedDataDict, gbs: int, tokens: str) -> list[BatchedDataDict]:
        shards, packing = sharded(data, self.dp, gbs), self.config["sequence_packing"]
        if packing["enabled"]:
            multiple = self.config["make_sequence_length_divisible_by"]
            own = gbs // self.dp
            shards = [packed(shard, own, packing[tokens], multiple) for shard in shards]
        return shards
