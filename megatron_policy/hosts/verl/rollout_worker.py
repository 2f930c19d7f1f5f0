"""verl's methods for vLLM's workers, with weights loaded by vLLM's layerwise reload.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=\\
        megatron_policy.hosts.verl.rollout_worker.RolloutWorker

verl loads into parameters that vLLM has processed for its kernels, which only some kernels allow:
those of CPUs have lost their loaders, and experts there go on with the old weights. Run with verl
0.9.1 and vLLM 0.31.0 on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.utils.vllm import resolve_weight_name
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.weight_update_utils import (
    apply_buffer_updates,
    split_buffer_updates,
)

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.reload import ModelReload

Weights = list[tuple[str, torch.Tensor]]


class RolloutWorker(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker. Whole sets of weights, also those that adapters adapt, go by the
    reload, which refuses one that leaves a parameter unfilled. Adapters alone become vLLM's own.
    Quantised models and drafters go verl's way.
    """

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        """Receive one set from the trainer's rank beside this worker, as verl calls it."""
        quantised = self.model_runner.vllm_config.model_config.quantization is not None
        if quantised or self._use_mtp_drafter_weight_sync():
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        elif peft_config and base_sync_done:
            self._receive_adapters(peft_config, use_shm)
        else:
            self._receive_whole(use_shm, adapted=bool(peft_config))

    def _receive_whole(self, use_shm: bool, *, adapted: bool) -> None:
        model = self.model_runner.get_model()
        # verl's buckets lie in memory that the next one overwrites.
        reload = ModelReload(model, self.model_runner.vllm_config, keeps_tensors=False)
        begun: list[bool] = []
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}

        def load(weights: Weights) -> None:
            if not begun:
                reload.begin()
                begun.append(True)
            parameters, buffers, _known = split_buffer_updates(model, weights)
            apply_buffer_updates(model, buffers)
            if adapted:  # the layer of a checkpoint may be within the one that has adapters
                parameters = [(resolve_weight_name(model, n, held), w) for n, w in parameters]
            reload.load(parameters)

        try:
            self._receive(load, use_shm)
            reload.finish()
        finally:
            reload.close()

    def _receive_adapters(self, peft_config: dict[str, Any], use_shm: bool) -> None:
        tensors: Weights = []
        self._receive(lambda some: tensors.extend((n, each.clone()) for n, each in some), use_shm)
        # verl 0.9.1 asks a model's mapping of names for its renames by the name that the method
        # had before vLLM 0.31.
        mapper: Any = type(getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None))
        if hasattr(mapper, "get_rename_mapper") and not hasattr(mapper, "get_unstacked_mapper"):
            mapper.get_unstacked_mapper = mapper.get_rename_mapper
        self.remove_lora(VLLM_LORA_INT_ID)
        try:
            self._update_weights(tensors, peft_config, base_sync_done=True)
        except Exception as error:
            raise RefitError(f"vLLM refuses the adapters, and has none now: {error}") from error
        manager = self.model_runner.lora_manager._adapter_manager
        unread = manager.get_adapter(VLLM_LORA_INT_ID).loras.keys() - manager.modules.keys()
        if unread:
            self.remove_lora(VLLM_LORA_INT_ID)
            raise RefitError(
                f"vLLM's {type(manager.model).__name__} has no layers for adapters of "
                f"{', '.join(sorted(unread)[:4])}, and would compute without them: set "
                "model.lora.merge=True, or leave them out of model.lora.target_modules"
            )

    def _receive(self, load: Callable[[Weights], None], use_shm: bool) -> None:
        """Load every bucket of a set. RefitError, once all of it has been received, for the first
        failure: verl's sender waits for an answer to every bucket, without a time limit, and none
        comes as long as a traceback holds tensors of a bucket.
        """
        failures: list[str] = []

        def take(weights: Weights, *_: bool) -> None:
            if failures:
                return
            try:
                load(weights)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=take)
        if failures:
            raise RefitError(failures[0])
