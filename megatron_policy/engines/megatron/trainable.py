"""A wrapped model as `interfaces.engine.Trainable`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.table import Entry
from megatron_policy.device import return_unused
from megatron_policy.device.timing import Stopwatch
from megatron_policy.engines.megatron.gradient_norm import (
    ClippedApart,
    GradientNorm,
    separate_experts,
)
from megatron_policy.engines.megatron.loss_scale import SCALE, LossScale
from megatron_policy.engines.megatron.optimizer import (
    finalize_gradients,
    fuse_weight_gradients,
    make_optimizer,
    make_scheduler,
    wrap_chunks,
)
from megatron_policy.engines.megatron.optimizer_shards import MegatronOptimizerState
from megatron_policy.engines.megatron.routers import Routers
from megatron_policy.engines.shared import read_samples
from megatron_policy.interfaces.engine import NotFiniteError
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held

_SETTINGS = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)


@dataclass(frozen=True)
class MegatronTrainable:
    """Chunks in their gradient buffers, the optimizer over them and its schedule, of Megatron-Core,
    and the routers of a step.

    `empty_level` is when unused device memory is given back: from 1 on before the optimizer's part
    of a step, at 2 after it as well.
    """

    chunks: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    pending_reads: PendingReads
    gradient_norm: GradientNorm
    apart: ClippedApart | None
    stopwatch: Stopwatch
    scaling: LossScale | None
    """Only in float16."""
    routers: Routers
    empty_level: int = 0

    @property
    def state(self) -> MegatronOptimizerState:
        distributed = bool(self.chunks[0].ddp_config.use_distributed_optimizer)
        return MegatronOptimizerState(self.optimizer, distributed)

    @property
    def lr(self) -> float:
        return float(self.scheduler.get_lr({}))

    @property
    def weight_decay(self) -> float:
        return float(self.scheduler.get_wd())

    @property
    def loss_scale(self) -> float | None:
        return None if self.scaling is None else self.scaling.value

    def detach(self) -> None:
        """Remove the optimizer from the model's config.

        A distributed optimizer's parameters are views of the model's, whose graph holds its
        gradient hooks. Together with the config that is a cycle Python's collector cannot see.
        """
        for chunk in self.chunks:
            config = chunk.module.config
            config.grad_scale_func = config.no_sync_func = config.finalize_model_grads_func = None

    def zero_gradients(self) -> None:
        """Zero the gradient buffers and drop gradients held elsewhere."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.routers.restart()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within this context a run of the schedule adds to each rank's own gradients and reduces
        nothing.

        The schedule would reduce in two ways. First, a gradient bucket is sent when the last
        microbatch has filled it, and schedules leave `no_sync` for that one. Here `no_sync` is held
        from outside and theirs does nothing. Second, each run finalizes the gradients at its end,
        regardless of `no_sync`. A second run would sum already summed values, in buffers where a
        distributed optimizer's reduction has left only this rank's share valid.
        """
        config = self.chunks[0].config
        hooks = (config.no_sync_func, config.finalize_model_grads_func)
        with ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            # With no function in place of the second, a schedule would omit more than reductions.
            config.no_sync_func = nullcontext
            config.finalize_model_grads_func = lambda *_, **__: None
            try:
                yield
            finally:
                config.no_sync_func, config.finalize_model_grads_func = hooks

    def reduce_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor` and do once what a schedule does at its
        end: sum over data-parallel ranks, layer norms over tensor-parallel ranks, tied embeddings
        over stages.
        """
        self.routers.scale_losses(factor)
        for chunk in self.chunks:
            chunk.scale_gradients(factor)
            if chunk.ddp_config.overlap_grad_reduce:
                # No microbatch has sent the buckets.
                chunk.start_grad_sync()
        finalize_gradients(self.pending_reads, self.stopwatch, list(self.chunks))

    def step(self) -> float:
        """Clip the gradient and update the parameters; returns the whole model's gradient norm
        before clipping, without the parameters that are clipped `apart`.

        NotFiniteError, on every rank and before any parameter or state has changed, if that norm is
        not finite.
        """
        if self.empty_level >= 1:
            return_unused()
        optimizer, scale = self.optimizer, self.scaling
        distributed = bool(self.chunks[0].ddp_config.use_distributed_optimizer)

        def finite_norm() -> float:
            if scale is not None:
                scale.unscale(optimizer)
            norm = self.gradient_norm(optimizer, distributed=distributed)
            if not math.isfinite(norm):
                raise NotFiniteError(norm)
            if self.apart is not None:
                own = self.apart.norm(optimizer, distributed=distributed)
                if not math.isfinite(own):
                    raise NotFiniteError(own)
                self.apart.rescale(optimizer, own, norm)
            return norm

        # Megatron-Core's step computes the norm before it clips or changes anything.
        optimizer.get_grad_norm = finite_norm
        try:
            succeeded, norm, _ = optimizer.step()
        finally:
            del optimizer.get_grad_norm
        assert succeeded, "without loss scalers of its own Megatron-Core skips no step"
        if scale is not None:
            scale.count_step()
        self.routers.finish_step()
        if self.empty_level >= 2:
            return_unused()
        return float(norm)

    def skip_step(self) -> bool:
        return self.scaling is not None and self.scaling.lower()

    def settle(self) -> None:
        """Make the parameters current: an overlapped gather leaves them stale until the next
        forward.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def routing_metrics(self) -> dict[str, float]:
        return self.routers.metrics()

    def advance_schedule(self, samples: int) -> None:
        self.scheduler.step(increment=samples)

    def schedule_state(self) -> dict[str, Any]:
        """`num_steps`, the samples that the schedule has counted, its settings by Megatron-Core's
        names, and where a loss scale is: numbers and strings.
        """
        scheduler, scale = self.scheduler, self.scaling
        found = {"num_steps": scheduler.num_steps} | {n: getattr(scheduler, n) for n in _SETTINGS}
        return found if scale is None else found | scale.state()

    def restore_schedule(self, state: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        """Continue from the sample at which `state` was taken, by the configuration's own schedule,
        which sets all groups' rates.

        Returns the settings that differ, each as (in `state`, configured); None means that `state`
        lacks it. CheckpointError without a count.
        """
        steps = read_samples(state)
        configured, scale = self.schedule_state(), self.scaling
        anew = scale is not None and not scale.restore(state)
        # Set directly: Megatron-Core's own load adds to the count and takes rates from the file.
        self.scheduler.num_steps = steps
        self.scheduler.step(increment=0)
        saved = {name: state.get(name) for name in _SETTINGS}
        changed = {n: (saved[n], configured[n]) for n in _SETTINGS if saved[n] != configured[n]}
        return changed | ({SCALE: (None, scale.value)} if scale is not None and anew else {})


def freeze(held: Held, groups: ParamGroups) -> None:
    """Let parameters of frozen groups need no gradients; to be called before `make_trainable`."""
    for entry, parameter in held:
        if isinstance(parameter, torch.nn.Parameter) and groups.frozen(entry):
            parameter.requires_grad_(False)


def make_trainable(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    settings: MegatronConfig,
    global_batch_size: int,
    pending_reads: PendingReads,
    held: Held,
    architecture: Architecture,
    place: Placement,
    routers: Routers,
    param_groups: ParamGroups,
) -> MegatronTrainable:
    """Wrap loaded chunks for training. `held` are their parameters with their rows.

    `settings.optimizer.clip_grad` is the L2 norm to which the whole model's gradient is clipped, or
    what is not clipped apart of it; 0 does not clip. `pending_reads` are waited for before a step
    changes anything.
    """
    separate_experts(held, place)
    together, apart = held, None
    if settings.mtp_detach_heads and architecture.mtp_layers:
        together = [pair for pair in held if not _in_mtp_layer(pair[0])]
        detached = [pair for pair in held if _in_mtp_layer(pair[0])]
        apart = ClippedApart.of(detached, architecture, place, settings.optimizer.clip_grad)
    wrapped = wrap_chunks(chunks, config, settings, place.topology.dp * place.topology.cp)
    fuse_weight_gradients(chunks)
    optimizer = make_optimizer(wrapped, config.params_dtype, settings, held, param_groups)
    model = MegatronTrainable(
        wrapped,
        optimizer,
        make_scheduler(optimizer, settings, global_batch_size),
        pending_reads,
        GradientNorm.of(together, architecture, place),
        apart,
        Stopwatch(),
        LossScale(settings.optimizer) if config.params_dtype == torch.float16 else None,
        routers,
        settings.empty_unused_memory_level,
    )
    # The pipeline schedule's ways into gradient buffers and optimizer.
    config.finalize_model_grads_func = partial(finalize_gradients, pending_reads, model.stopwatch)
    scale = model.scaling
    config.grad_scale_func = optimizer.scale_loss if scale is None else scale.scale
    if wrapped[0].ddp_config.overlap_grad_reduce:
        contexts = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
    # Otherwise the first forward pass would gather parameters, and wait for other replicas there.
    model.settle()
    return model


def _in_mtp_layer(entry: Entry) -> bool:
    return entry.megatron.startswith("mtp.layers.")
