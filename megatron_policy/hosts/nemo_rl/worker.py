"""The actor that NeMo RL starts for one rank: this package's worker with the host's names,
arguments and types. Importing it imports neither Megatron-Core nor the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray
import torch

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import allocated
from megatron_policy.device.profiling import device_name
from megatron_policy.dtypes import dtype_named
from megatron_policy.hosts.nemo_rl.config import (
    check_layout_of_host,
    parse_host_config,
    refuse_lone_generation,
    shares_devices,
)
from megatron_policy.hosts.nemo_rl.data_plane import fetch_rows
from megatron_policy.hosts.nemo_rl.host_imports import (
    rename_result,
    to_host_batch,
)
from megatron_policy.hosts.nemo_rl.losses import adapt_loss, set_aside
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED, refuses
from megatron_policy.hosts.nemo_rl.refit import HostRefits, find_node_and_device
from megatron_policy.hosts.nemo_rl.rows import exchange_host_batches, read_host_batch
from megatron_policy.memory.states import Kind
from megatron_policy.policy.driver_names import delegate
from megatron_policy.workers.assigned_gpu import ALL_VISIBLE
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

ACTOR_OPTIONS: dict[str, Any] = {"runtime_env": {"env_vars": dict(ALL_VISIBLE)}}
"""For `ray.remote`: the worker sees all GPUs of its node, as the host's own Megatron worker does.

The host removes the variable from the workers' environment, and merges such options in. A
`configure_worker` could ask for it too, but must return three values up to 0.6 and four since.
"""


@refuses(NOT_IMPLEMENTED)
class NemoRLWorker(MegatronPolicyWorkerImpl):
    """One rank under NeMo RL's driver, of 0.3 or later.

    Versions are detected by what can be imported and what a call passes, never by number. Arguments
    and results are those of the host's own Megatron worker; returned batches are the host's
    `BatchedDataDict` if it exists. Other methods refuse with a reason (`not_implemented`).
    """

    data_plane: Any = None
    """The host's mixin, from the first call on that it carries out."""
    _may_generate = False

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
        unused, and so is the `processor`: pixels come with the data. NotImplementedError for
        `skip_weight_load`, ConfigError for other arguments that are set.
        """
        if skip_weight_load:
            raise NotImplementedError(
                "skip_weight_load: the weights would come by swap_weights_via_reshard, which is "
                f"not implemented: {NOT_IMPLEMENTED['swap_weights_via_reshard']}"
            )
        make_audible()
        parsed = parse_host_config(config, weights_path, optimizer_path)
        check_layout_of_host(worker_sharding_annotations, parsed)
        self.host_config = config
        if not shares_devices(config):
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
        self.refits = HostRefits(self.policy, share_devices=shares_devices(config))

    def train(  # type: ignore[override]
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
        given, loss_fn = set_aside(read_host_batch(self, data), aside), adapt_loss(loss_fn, aside)
        return self._report(
            self.policy.train(given, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)
        )

    def begin_train_step(
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step trained in parts; see `GradientAccumulator`."""
        self.policy.begin_train_step(adapt_loss(loss_fn), gbs=gbs, mbs=mbs)

    def train_microbatch(self, data: Mapping[str, Any]) -> None:
        """Accumulate a part of that step; see `GradientAccumulator`."""
        self.policy.train_microbatch(read_host_batch(self, data))

    def finish_train_step(self) -> dict[str, Any]:
        """Take that step; returns what `train` does."""
        return self._report(self.policy.finish_train_step())

    def _report(self, result: Mapping[str, Any]) -> dict[str, Any]:
        precision = dtype_named(self.policy.config.precision)
        return rename_result(result) | {"gpu_name": device_name(), "model_dtype": precision}

    get_logprobs = exchange_host_batches(MegatronPolicyWorkerImpl.get_logprobs)
    get_reference_policy_logprobs = exchange_host_batches(
        MegatronPolicyWorkerImpl.get_reference_policy_logprobs
    )
    get_entropy = exchange_host_batches(MegatronPolicyWorkerImpl.get_entropy)
    score = exchange_host_batches(MegatronPolicyWorkerImpl.score)
    prepare_refit_info = delegate("refits", HostRefits.announce_weights)  # type: ignore[arg-type]
    get_refit_address = delegate("refits", HostRefits.get_refit_address)
    get_zmq_address = get_refit_address
    stream_weights_via_ipc_zmq = delegate("refits", HostRefits.stream_weights_via_ipc_zmq)
    init_collective = delegate("refits", HostRefits.meet_engines)  # type: ignore[arg-type]
    broadcast_weights_for_collective = delegate(
        "refits", HostRefits.broadcast_weights_for_collective
    )
    setup_data_plane = fetch_rows("setup_data_plane")
    train_presharded = fetch_rows("train_presharded")
    get_logprobs_presharded = fetch_rows("get_logprobs_presharded")
    get_reference_policy_logprobs_presharded = fetch_rows(
        "get_reference_policy_logprobs_presharded"
    )
    begin_train_step_presharded = fetch_rows("begin_train_step_presharded")
    train_microbatch_presharded = fetch_rows("train_microbatch_presharded")
    finish_train_step_presharded = fetch_rows("finish_train_step_presharded")
    abort_train_step_presharded = fetch_rows("abort_train_step_presharded")

    def maybe_init_zmq(self) -> None:
        """Do nothing: the socket exists during a refit. Engines can connect before."""

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> Any:
        """`topk_logits`, fp32, and `topk_indices`, int64, both [B, S, k]: divided by the
        temperature of `policy.generation`, as the host's are in every version that has them.
        """
        found = self.policy.get_topk_logits(read_host_batch(self, data), k, micro_batch_size)
        generation = self.policy.config.generation
        if generation is not None and generation.temperature:
            found["topk_logits"] /= generation.temperature
        return to_host_batch(found)

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Any:
        """Continue each prompt; see `GenerationOutputSpec` for the result. Drivers with the backend
        `megatron` ask every worker up to 0.6, later the first one alone.

        Offloaded parameters are brought back, by all workers: hosts up to 0.6 call no more than
        this. Later ones have prepared all of them, and call one.
        """
        if Kind.PARAMETERS not in self.policy.memory.state.holds:
            self.policy.prepare_for_generation()
        return to_host_batch(super().generate(read_host_batch(self, data), greedy))

    def generate_async(self, data: Mapping[str, Any], greedy: bool = False) -> Iterator[Any]:
        """The number of each prompt, and its continuation as `generate` returns it, in order."""
        found = dict(self.generate(data, greedy))
        for row in range(len(found["output_ids"])):
            one = {key: value[row : row + 1] for key, value in found.items()}
            yield row, to_host_batch(BatchedDataDict(one))

    def prepare_for_generation(self, **kwargs: Any) -> None:
        """Parameters on the device, for `generate`; the host's engine settings have no effect.

        NotImplementedError if the host would call only one worker of those that share the model.
        """
        if not self._may_generate:
            refuse_lone_generation(self.policy.topology)
            self._may_generate = True
        self.policy.prepare_for_generation()

    def finish_generation(self, release_gpu: bool = True) -> None:
        """Do nothing: there is nothing to clean up."""

    def get_gpu_info(self) -> dict[str, Any]:
        """Rank, device and its memory, in any state of the policy: under the host's keys, in MiB,
        and under ours; and the rank's environment.
        """
        own, shown = super().get_gpu_info(), ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        return own | {
            "local_device_id": device.current_device().index or 0,
            "global_device_id": find_node_and_device()[1],
            "device_count": device.accelerators(),
            "device_name": device_name(),
            "memory_allocated_mb": allocated() / 2**20,
            "peak_memory_allocated_mb": own["memory_peak"] / 2**20,
            "env_vars": {key: os.environ[key] for key in shown if key in os.environ},
        }

    def report_node_ip_and_gpu_id(self) -> tuple[str, int]:
        """This node's address and the number of this worker's GPU; without one, its LOCAL_RANK."""
        return find_node_and_device()

    def check_tensor_parallel_attributes(self) -> dict[str, Any]:
        """How Megatron-Core has marked each parameter: `tp_params` are split over tensor-parallel
        ranks in `partition_dim`, `non_tp_params` are whole on each rank. Names begin with
        "module.", as the host's model is wrapped.
        """
        found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for name, parameter in self.policy.named_parameters():
            if isinstance(parameter, torch.nn.Parameter):
                split = getattr(parameter, "tensor_model_parallel", False)
                told = {"name": f"module.{name}", "tensor_model_parallel": split}
                told["shape"] = list(parameter.shape)
                for key in ("partition_dim", "partition_stride") if split else ():
                    told[key] = getattr(parameter, key, None)
                found[bool(split)].append(told)
        return {
            "tp_params": found[True],
            "non_tp_params": found[False],
            "total_params": len(found[True]) + len(found[False]),
            "tp_size": self.policy.topology.tp,
        }

    @torch.no_grad()
    def zero_out_weights(self) -> None:
        """Set every weight to 0, for tests; do not train afterwards."""
        for _, parameter in self.policy.named_parameters():
            parameter.zero_()


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


MegatronPolicyWorker = ray.remote(**ACTOR_OPTIONS)(NemoRLWorker)
"""`NemoRLWorker` as an actor."""
