"""verl's methods for vLLM's workers, with weights loaded by vLLM's layerwise reload.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=\\
        megatron_policy.hosts.verl.rollout_worker.RolloutWorker

verl loads into parameters that vLLM has processed for its kernels, which only some kernels allow:
those of CPUs have lost their loaders, and experts there go on with the old weights. Run with verl
0.9.1 and vLLM 0.31.0 on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.weight_update_utils import (
    apply_buffer_updates,
    split_buffer_updates,
)

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.reload import ModelReload


class RolloutWorker(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker. Whole sets of weights go by the reload, which refuses one that
    leaves a parameter unfilled; adapters, quantised models and drafters go verl's way.
    """

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        """Receive one set from the trainer's rank beside this worker, as verl calls it."""
        quantised = self.model_runner.vllm_config.model_config.quantization is not None
        if peft_config or quantised or self._use_mtp_drafter_weight_sync():
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        model = self.model_runner.get_model()
        # verl's buckets lie in memory that the next one overwrites.
        reload = ModelReload(model, self.model_runner.vllm_config, keeps_tensors=False)

        failures: list[str] = []
        begun: list[bool] = []

        def load(weights: list[tuple[str, torch.Tensor]], *_: bool) -> None:
            if failures:
                return
            try:
                if not begun:
                    reload.begin()
                    begun.append(True)
                parameters, buffers, _known = split_buffer_updates(model, weights)
                apply_buffer_updates(model, buffers)
                reload.load(parameters)
            except Exception as error:
                # verl's sender waits for an answer to every bucket, without a time limit, and none
                # comes as long as a traceback holds tensors of a bucket.
                failures.append(f"{type(error).__name__}: {error}")

        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        try:
            receiver.receive_weights(on_bucket_received=load)
            if failures:
                raise RefitError(failures[0])
            reload.finish()
        finally:
            reload.close()
