"""One rank's policy, with what it keeps for engines and profiles, under the names that drivers
call. It needs no Ray; `policy.MegatronPolicyWorker` is its actor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.device.profiling import start_profiling, stop_profiling
from megatron_policy.errors import ConfigError
from megatron_policy.memory import move_model
from megatron_policy.parallel.topology import Topology
from megatron_policy.policy import MegatronPolicy
from megatron_policy.policy.driver_names import delegate
from megatron_policy.policy.probing import EngineProbing
from megatron_policy.workers.assigned_gpu import find_own_gpu
from megatron_policy.workers.checks import refuse_unknown
from megatron_policy.workers.refits import EngineRefits

if TYPE_CHECKING:
    from megatron_policy.checkpoint.report import LoadReport, SaveReport
    from megatron_policy.policy.profiling import Profile

NOISE_STD = 0.01


def split_buffers(
    cp_mesh: Any,
    cp_buffers: Any,
    cp_seq_dims: Any,
    cp_no_restore_buffers: Any,
    cp_rotate_method: str | None = None,
) -> Any:
    """Torch's `context_parallel`, for models of the caller's own: a policy splits its sequences by
    itself.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    if cp_rotate_method is not None:
        set_rotate_method(cp_rotate_method)
    return context_parallel(
        cp_mesh,
        buffers=cp_buffers,
        buffer_seq_dims=cp_seq_dims,
        no_restore_buffers=cp_no_restore_buffers,
    )


@contextmanager
def use_fused_kernels(cp_context: Any = None) -> Iterator[None]:
    """Within `cp_context`, if one is given, attention runs by fused kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with ExitStack() as stack:
        if cp_context is not None:
            fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
            stack.enter_context(sdpa_kernel(fused))
            stack.enter_context(cp_context)
        yield


class MegatronPolicyWorkerImpl:
    """One rank's policy under the names that drivers call; what is not written here is a method of
    the policy or of `refits`.

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

    _profile: tuple[ExitStack, Profile] | None = None

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
        if (gpu := find_own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))) is not None:
            device.choose_gpu(gpu)
        self.policy = MegatronPolicy(
            PolicyConfig.parse(config),
            tokenizer,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
        )
        self.refits = EngineRefits(self.policy)
        caller = worker_sharding_annotations
        if isinstance(caller, Topology) and caller != self.policy.topology:
            raise ConfigError(
                f"the driver uses layout {caller}, but the configuration gives "
                f"{self.policy.topology}"
            )

    def __repr__(self) -> str:
        return f"MegatronPolicyWorker[rank={os.environ.get('RANK', '?')}]"

    train = delegate("policy", MegatronPolicy.train)
    dry_run = delegate("policy", MegatronPolicy.dry_run)
    begin_train_step = delegate("policy", MegatronPolicy.begin_train_step)
    train_microbatch = delegate("policy", MegatronPolicy.train_microbatch)
    finish_train_step = delegate("policy", MegatronPolicy.finish_train_step)
    abort_train_step = delegate("policy", MegatronPolicy.abort_train_step)
    get_logprobs = delegate("policy", MegatronPolicy.get_logprobs)
    get_entropy = delegate("policy", MegatronPolicy.get_entropy)
    get_topk_logits = delegate("policy", MegatronPolicy.get_topk_logits)
    get_values = delegate("policy", MegatronPolicy.get_values)
    use_reference_model = delegate("policy", MegatronPolicy.use_reference_model)
    get_reference_policy_logprobs = delegate("policy", MegatronPolicy.get_reference_policy_logprobs)
    export_hf = delegate("policy", MegatronPolicy.export_hf)
    export_peft = delegate("policy", MegatronPolicy.export_peft)
    refit = delegate("policy", MegatronPolicy.refit)
    begin_refit = delegate("policy", MegatronPolicy.begin_refit)
    finish_refit = delegate("policy", MegatronPolicy.finish_refit)
    probe = delegate("policy", MegatronPolicy.probe)
    probe_facts = delegate("policy.probing", EngineProbing.probe_facts)
    probe_logprobs = delegate("policy.probing", EngineProbing.probe_logprobs)
    disturb_weights = delegate("policy.probing", EngineProbing.disturb_weights)
    load_checkpoint = delegate("policy", MegatronPolicy.load_checkpoint)
    finalize_async_save = delegate("policy", MegatronPolicy.finalize_async_save)
    summary = delegate("policy", MegatronPolicy.summary)
    report = delegate("policy", MegatronPolicy.report)
    write_metrics = delegate("policy", MegatronPolicy.write_metrics)
    prepare_for_training = delegate("policy", MegatronPolicy.prepare_for_training)
    prepare_for_lp_inference = delegate("policy", MegatronPolicy.prepare_for_lp_inference)
    prepare_for_generation = delegate("policy", MegatronPolicy.prepare_for_generation)
    finish_training = delegate("policy", MegatronPolicy.finish_training)
    finish_inference = delegate("policy", MegatronPolicy.finish_inference)
    offload_before_refit = delegate("policy", MegatronPolicy.offload_before_refit)
    move_to_cpu = delegate("policy.memory", move_model.move_to_host)
    move_to_cuda = delegate("policy.memory", move_model.move_to_own_device)
    move_to_device = delegate("policy.memory", move_model.move_to_device)
    move_buffer_to_device = delegate("policy.memory", move_model.move_buffers)
    manual_offload_to_cpu, manual_load_to_gpu = move_to_cpu, move_to_cuda
    prepare_refit_info = delegate("refits", EngineRefits.prepare_refit_info)
    prepare_info_for_collective = delegate("refits", EngineRefits.prepare_info_for_collective)
    get_refit_address = delegate("refits", EngineRefits.get_refit_address)
    stream_weights_via_ipc_zmq = delegate("refits", EngineRefits.stream_weights_via_ipc_zmq)
    prepare_weights_for_ipc = delegate("refits", EngineRefits.prepare_weights_for_ipc)
    get_weights_ipc_handles = delegate("refits", EngineRefits.get_weights_ipc_handles)
    get_refit_manifest = delegate("refits", EngineRefits.get_refit_manifest)
    init_collective = delegate("refits", EngineRefits.init_collective)
    get_refit_secret = delegate("refits", EngineRefits.get_refit_secret)
    broadcast_weights_for_collective = delegate(
        "refits", EngineRefits.broadcast_weights_for_collective
    )
    begin_refit_for_collective = delegate("refits", EngineRefits.begin_refit_for_collective)
    create_context_parallel_ctx = staticmethod(split_buffers)
    train_context = staticmethod(use_fused_kernels)

    def is_alive(self) -> bool:
        """True if the worker answers."""
        return True

    def report_device_id(self) -> str:
        """An identifier of the device this rank computes on, unique in the cluster."""
        return device.device_id()

    def reset_peak_memory_stats(self) -> None:
        """Restart the count of peak device memory."""
        device.reset_peak_memory()

    def start_gpu_profiling(self) -> None:
        """Start a range for a waiting profiler of this process; without a GPU do nothing."""
        start_profiling()

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        stop_profiling()

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

    def get_free_memory_bytes(self) -> int:
        """Free bytes of this rank's device, or of the host's memory on CPU."""
        return device.memory_info().free

    def score(self, data: BatchedDataDict) -> BatchedDataDict:
        """`scores`, fp32 [B]: what a scalar head makes of each row."""
        return BatchedDataDict({"scores": self.policy.score(data)})

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Continue each prompt; see `GenerationOutputSpec` for the result."""
        found = self.policy.generate(BatchedDataDict(data), greedy=greedy)
        return BatchedDataDict(
            {
                "output_ids": found.tokens_BT.cpu(),
                "generation_lengths": found.generated_B.cpu(),
                "unpadded_sequence_lengths": found.lengths_B.cpu(),
                "logprobs": found.logprobs_BT.cpu(),
            }
        )

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        host_data: Mapping[str, Any] | None = None,
        hf_export: str | None = None,
        checkpointing_cfg: Any = None,
        **options: Any,
    ) -> SaveReport | None:
        """`MegatronPolicy.save_checkpoint` of state that is first moved to the device, and stays
        there. `checkpointing_cfg` is the host's and has no effect.
        """
        refuse_unknown("save_checkpoint", options)
        paths = (weights_path, optimizer_path, tokenizer_path)
        return self.policy.save_checkpoint(
            *paths, host_data=host_data, hf_export=hf_export, onload=True
        )

    def get_load_report(self) -> LoadReport | None:
        """What a start from a checkpoint has restored; None without such a start."""
        return self.policy.loaded

    def offload_after_refit(self) -> None:
        """Nothing on the device: it is free for the engine."""
        self.policy.offload_after_refit()
        self.refits.release_handles()

    def begin_profile(self, folder: str, operations: bool = True) -> None:
        """Open the context of `MegatronPolicy.profile`."""
        stack = ExitStack()
        found = stack.enter_context(self.policy.profile(folder, operations=operations))
        self._profile = stack, found

    def end_profile(self, failed: bool = False) -> Profile | None:
        """Leave that context, after an error if `failed`; then nothing is written. ConfigError if
        none is open.
        """
        if self._profile is None:
            raise ConfigError("end_profile(): no profile is open, call begin_profile() first")
        (stack, found), self._profile = self._profile, None
        with suppress(_FailedElsewhere), stack:
            if failed:
                raise _FailedElsewhere
            return found
        return None

    def return_state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters on the CPU, under their canonical Megatron-Core names."""
        held = self.policy.named_parameters()
        return {name: parameter.detach().cpu().clone() for name, parameter in held}

    def return_model_config(self) -> Any:
        """Transformers' config of the model."""
        from megatron_policy.converters.formats.hf_config import transformers_config

        config = self.policy.config
        return transformers_config(config.model_name, config.hf_config_overrides)

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
        """Complete a running save and a refit under way, and leave the process groups; the process
        ends with its actor.
        """
        try:
            self.policy.finish_refit()
        finally:
            self.refits.close()
            self.policy.shutdown()
        return True


class _FailedElsewhere(Exception):
    """What leaves a worker's profile after an error in the driver's."""
