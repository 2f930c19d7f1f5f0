"""The actor of one rank: a MegatronPolicy under the host's method names.

Each base class `Worker...` has the methods of one subject, in its own module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers.checks import refuse_unknown
from megatron_policy.workers.profiling import WorkerProfiling
from megatron_policy.workers.worker.accumulation import WorkerAccumulation
from megatron_policy.workers.worker.assigned_gpu import own_gpu
from megatron_policy.workers.worker.checkpoint import WorkerCheckpoint
from megatron_policy.workers.worker.memory import WorkerMemory
from megatron_policy.workers.worker.model import WorkerModel
from megatron_policy.workers.worker.monitoring import WorkerMonitoring
from megatron_policy.workers.worker.refit import WorkerRefit

if TYPE_CHECKING:
    from megatron_policy.interfaces import LossFunction
    from megatron_policy.training.dry_run import DryRun

NOISE_STD = 0.01


class MegatronPolicyWorkerImpl(
    WorkerProfiling,
    WorkerCheckpoint,
    WorkerRefit,
    WorkerMemory,
    WorkerModel,
    WorkerAccumulation,
    WorkerMonitoring,
):
    """One rank's policy under the host's names.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set when it is constructed. Arguments are
    keywords. `data` is this data-parallel rank's shard, with its microbatch plan if the driver
    made one, and is not changed; results are on the CPU and complete on every rank.

    Args:
        config: as the host passes it, a mapping, or parsed.
        tokenizer: anything with `pad_token_id` and `eos_token_id`; only `generate` needs one.
            Exports and checkpoints have it if it can be saved (`save_pretrained`).
        weights_path, optimizer_path: a checkpoint to resume from, see `MegatronPolicy`.
        worker_sharding_annotations: the caller's rank grid; a Topology must equal the config's.
        pre_init_communication_queue: accepted for the host; ranks meet in torch.distributed.
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: Any = None,
        pre_init_communication_queue: Any = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown("MegatronPolicyWorker", kwargs)
        # Not at the top: the host imports this module where Megatron-Core or a GPU may be missing.
        from megatron_policy.policy import MegatronPolicy

        if (gpu := own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))) is not None:
            device.choose_gpu(gpu)
        self.policy = MegatronPolicy(
            PolicyConfig.parse(config),
            tokenizer,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
        )
        caller = worker_sharding_annotations
        if isinstance(caller, Topology) and caller != self.policy.topology:
            raise ConfigError(
                f"the driver uses layout {caller}, but the configuration gives "
                f"{self.policy.topology}"
            )

    def __repr__(self) -> str:
        return f"MegatronPolicyWorker[rank={os.environ.get('RANK', '?')}]"

    def is_alive(self) -> bool:
        """True if the worker answers."""
        return True

    def report_device_id(self) -> str:
        """An identifier of the device this rank computes on, unique in the cluster."""
        return device.device_id()

    def get_gpu_info(self) -> dict[str, Any]:
        """Rank, device and its memory in bytes (the host's, if the rank computes on the CPU)."""
        memory = device.memory_info()
        return {
            "rank": self.policy.rank,
            "world_size": self.policy.topology.world_size,
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "device": str(device.current_device()),
            "device_id": device.device_id(),
            "memory_free": memory.free,
            "memory_total": memory.total,
            "memory_peak": memory.peak,
        }

    def reset_peak_memory_stats(self) -> None:
        """Restart the count of peak device memory."""
        device.reset_peak_memory()

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Train (or evaluate) on this rank's shard; see `MegatronPolicy.train` for the result."""
        return self.policy.train(_batch(data), loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)

    def dry_run(self, data: Mapping[str, Any], loss_fn: LossFunction) -> DryRun:
        """Try a loss on the first rows; see `MegatronPolicy.dry_run`."""
        return self.policy.dry_run(_batch(data), loss_fn)

    def get_logprobs(
        self,
        data: Mapping[str, Any],
        micro_batch_size: int | None = None,
        return_routed_experts: bool = False,
    ) -> BatchedDataDict:
        """`logprobs`, fp32 [B, S]; on request `routed_experts`, see `MegatronPolicy.logprobs`."""
        return self.policy.get_logprobs(_batch(data), micro_batch_size, return_routed_experts)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs`, fp32 [B, S], under the weights the policy started from."""
        return self.policy.get_reference_policy_logprobs(_batch(data), micro_batch_size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`topk_logits`, fp32, and `topk_indices`, int64, both [B, S, k]."""
        return self.policy.get_topk_logits(_batch(data), k, micro_batch_size)

    def get_entropy(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`entropy`, fp32 [B, S], of the distributions that `get_logprobs` uses."""
        return self.policy.get_entropy(_batch(data), micro_batch_size)

    def get_values(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`values`, fp32 [B, S]: what a scalar head makes of the tokens up to each position."""
        return self.policy.get_values(_batch(data), micro_batch_size)

    def score(self, data: Mapping[str, Any]) -> BatchedDataDict:
        """`scores`, fp32 [B]: what a scalar head makes of each row."""
        return BatchedDataDict({"scores": self.policy.score(_batch(data))})

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Continue each prompt; see `GenerationOutputSpec` for the result."""
        found = self.policy.generate(_batch(data), greedy=greedy)
        return BatchedDataDict(
            {
                "output_ids": found.tokens_BT.cpu(),
                "generation_lengths": found.generated_B.cpu(),
                "unpadded_sequence_lengths": found.lengths_B.cpu(),
                "logprobs": found.logprobs_BT.cpu(),
            }
        )

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Compute with the weights the policy started from within this context."""
        with self.policy.use_reference_model():
            yield

    def return_state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters on the CPU, under their canonical Megatron-Core names."""
        held = self.policy.named_parameters()
        return {name: parameter.detach().cpu().clone() for name, parameter in held}

    def export_hf(
        self, path: str, max_shard_bytes: int | None = None, overwrite: bool = False
    ) -> None:
        """Write a Hugging Face checkpoint, each rank its part; see `MegatronPolicy.export_hf`."""
        size = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
        self.policy.export_hf(path, overwrite=overwrite, **size)

    def export_peft(self, path: str, overwrite: bool = False) -> None:
        """Write the adapters as PEFT does; see `MegatronPolicy.export_peft`."""
        self.policy.export_peft(path, overwrite=overwrite)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Change every weight a little, alike on all ranks that hold it, for tests.

        The optimizer is not informed: do not train afterwards.
        """
        for name, parameter in self.policy.named_parameters():
            # Tied embeddings are one matrix under two names.
            twin = name.replace("output_layer.", "embedding.word_embeddings.")
            generator = torch.Generator().manual_seed(crc32(twin.encode()))
            noise = torch.randn(parameter.shape, generator=generator) * NOISE_STD
            parameter.add_(noise.to(parameter))

    def shutdown(self) -> bool:
        """Complete a running save and leave the process groups; the process ends with its actor."""
        self._release_handles()
        self._leave_collective()
        self.policy.shutdown()
        return True


def _batch(data: Mapping[str, Any]) -> BatchedDataDict:
    return data if isinstance(data, BatchedDataDict) else BatchedDataDict(data)
