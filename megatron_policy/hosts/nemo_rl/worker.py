"""The actor that NeMo RL starts for one rank: this package's worker with the host's names,
arguments and types. Importing it imports neither Megatron-Core nor the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch

from megatron_policy import device
from megatron_policy.config import PolicyConfig
from megatron_policy.device.profiling import device_name
from megatron_policy.dtypes import dtype_named
from megatron_policy.hosts.nemo_rl.checkpoints import as_host_means
from megatron_policy.hosts.nemo_rl.data_plane import DataPlane
from megatron_policy.hosts.nemo_rl.generation import (
    HostGeneration,
    filters_as_host_means,
    scaled,
    shares_devices,
)
from megatron_policy.hosts.nemo_rl.layout import check_layout_of_host
from megatron_policy.hosts.nemo_rl.losses import adapted, set_aside
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED, refuses
from megatron_policy.hosts.nemo_rl.refit import HostRefit
from megatron_policy.hosts.nemo_rl.result_types import in_host_types, training_result
from megatron_policy.hosts.nemo_rl.worker_info import (
    device_info,
    node_and_device,
    tensor_parallel_attributes,
)
from megatron_policy.workers.worker.assigned_gpu import ALL_VISIBLE

ACTOR_OPTIONS: dict[str, Any] = {"runtime_env": {"env_vars": dict(ALL_VISIBLE)}}
"""For `ray.remote`: the worker sees all GPUs of its node, as the host's own Megatron worker does.

The host removes the variable from the workers' environment, and merges such options in. A
`configure_worker` could ask for it too, but must return three values up to 0.6 and four since.
"""


@refuses(NOT_IMPLEMENTED)
class NemoRLWorker(DataPlane, HostRefit, HostGeneration):
    """One rank under NeMo RL's driver, of 0.3 or later.

    Versions are detected by what can be imported and what a call passes, never by number. Arguments
    and results are those of the host's own Megatron worker; returned batches are the host's
    `BatchedDataDict` if it exists. Other methods refuse with a reason (`not_implemented`).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        processor: Any = None,
        worker_sharding_annotations: Any = None,
        pre_init_communication_queue: Any = None,
        skip_weight_load: bool = False,
        **kwargs: Any,
    ) -> None:
        """`worker_sharding_annotations` is the driver's rank grid and must equal ours; the queue is
        unused. NotImplementedError for a `processor` and for `skip_weight_load`, ConfigError for
        other arguments that are set.
        """
        if processor is not None:
            raise NotImplementedError("processor: multimodal models are not supported; pass None")
        if skip_weight_load:
            raise NotImplementedError(
                "skip_weight_load: the weights would come by swap_weights_via_reshard, which is "
                f"not implemented: {NOT_IMPLEMENTED['swap_weights_via_reshard']}"
            )
        make_audible()
        parsed = as_host_means(PolicyConfig.parse(config), weights_path, optimizer_path)
        parsed = filters_as_host_means(parsed)
        check_layout_of_host(worker_sharding_annotations, parsed)
        self._host_config, self._tokenizer = config, tokenizer
        self._shares_devices = shares_devices(config)
        if not self._shares_devices:
            device.prepare_for_other_engines()
        super().__init__(
            parsed,
            tokenizer,
            weights_path,
            optimizer_path,
            init_optimizer,
            init_reference_model,
            **kwargs,
        )

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        check_dim_skip_keys: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Train (or evaluate) on this rank's shard; see `TrainResult`. It has the host's
        names here, and the device's name and the model's dtype. Dimension 1 of what stands under
        `check_dim_skip_keys` is not the sequence.
        """
        aside = tuple(check_dim_skip_keys or ())
        result = super().train(
            set_aside(data, aside), adapted(loss_fn, aside), eval_mode=eval_mode, gbs=gbs, mbs=mbs
        )
        return training_result(result) | self._about_model()

    def begin_train_step(
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step trained in parts; see `GradientAccumulator`."""
        super().begin_train_step(adapted(loss_fn), gbs=gbs, mbs=mbs)

    def finish_train_step(self) -> dict[str, Any]:
        """Take that step; returns what `train` does."""
        return training_result(super().finish_train_step()) | self._about_model()

    def get_logprobs(
        self,
        data: Mapping[str, Any],
        micro_batch_size: int | None = None,
        return_routed_experts: bool = False,
    ) -> Any:
        """`logprobs`, fp32 [B, S], and on request `routed_experts`, integers [B, S, L, K]."""
        return in_host_types(super().get_logprobs(data, micro_batch_size, return_routed_experts))

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> Any:
        """`reference_logprobs`, fp32 [B, S], under the weights the policy started from."""
        return in_host_types(super().get_reference_policy_logprobs(data, micro_batch_size))

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> Any:
        """`topk_logits`, fp32, and `topk_indices`, int64, both [B, S, k], at the temperature of
        `policy.generation`, like the host's.
        """
        found = super().get_topk_logits(data, k, micro_batch_size)
        found["topk_logits"] = scaled(found["topk_logits"], self.policy.config)
        return in_host_types(found)

    def get_entropy(self, data: Mapping[str, Any], micro_batch_size: int | None = None) -> Any:
        """`entropy`, fp32 [B, S], of the distributions that `get_logprobs` uses."""
        return in_host_types(super().get_entropy(data, micro_batch_size))

    def score(self, data: Mapping[str, Any]) -> Any:
        """`scores`, fp32 [B], of a reward model."""
        return in_host_types(super().score(data))

    def get_gpu_info(self) -> dict[str, Any]:
        """Rank, device and its memory, in any state of the policy."""
        return device_info() | super().get_gpu_info()

    def report_node_ip_and_gpu_id(self) -> tuple[str, int]:
        """This node's address and the number of this worker's GPU; without one, its LOCAL_RANK."""
        return node_and_device()

    def check_tensor_parallel_attributes(self) -> dict[str, Any]:
        """Which parameters are split over tensor-parallel ranks, and in which dimension. Names
        begin with "module.", as the host's model is wrapped.
        """
        named = self.policy.named_parameters()
        return tensor_parallel_attributes(named, self.policy.topology.tp)

    @torch.no_grad()
    def zero_out_weights(self) -> None:
        """Set every weight to 0, for tests; do not train afterwards."""
        for _, parameter in self.policy.named_parameters():
            parameter.zero_()

    def _about_model(self) -> dict[str, Any]:
        precision = dtype_named(self.policy.config.precision)
        return {"gpu_name": device_name(), "model_dtype": precision}


def make_audible() -> None:
    """On rank 0, send this package's log from level INFO up to the worker's output: keys without
    effect, what a start from a checkpoint has restored. An existing level or handlers are kept;
    other ranks would log the same.
    """
    log = logging.getLogger("megatron_policy")
    if os.environ.get("RANK", "0") != "0":
        return
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


@ray.remote(**ACTOR_OPTIONS)
class MegatronPolicyWorker(NemoRLWorker):
    """`NemoRLWorker` as an actor; Ray pickles it by value, so its body is empty."""
