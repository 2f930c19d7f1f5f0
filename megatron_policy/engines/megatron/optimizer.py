"""Gradient buffers, optimizer and learning-rate schedule around model chunks."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.config.trained import ParamGroupConfig
from megatron_policy.converters.rows import Role
from megatron_policy.device.timing import Stopwatch
from megatron_policy.engines.megatron.gradient_norm import ClippedApart, GradientNorm
from megatron_policy.engines.megatron.loss_scale import LossScale
from megatron_policy.engines.megatron.mtp import sum_embedding_gradients
from megatron_policy.interfaces.engine import REDUCE, NotFiniteError
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.weights.load import Held

# Megatron-LM's own default: buckets large enough to saturate the network, growing with the ring.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
_FUSES = "fuse_wgrad_accumulation"
"""What Transformer Engine names it."""


@dataclass(frozen=True)
class WrappedModel:
    """Chunks in their gradient buffers, the optimizer over them and its schedule."""

    chunks: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    pending_reads: PendingReads
    gradient_norm: GradientNorm
    apart: ClippedApart | None
    stopwatch: Stopwatch
    scaling: LossScale | None
    """Only in float16."""

    def detach(self) -> None:
        """Remove the optimizer from the model's config.

        A distributed optimizer's parameters are views of the model's, whose graph holds its
        gradient hooks. Together with the config that is a cycle Python's collector cannot see.
        """
        for chunk in self.chunks:
            config = chunk.module.config
            config.grad_scale_func = config.no_sync_func = config.finalize_model_grads_func = None

    def step(self) -> float:
        """Clip the gradient and update the parameters; returns the whole model's gradient norm
        before clipping, without the parameters that are clipped `apart`.

        NotFiniteError, on every rank and before any parameter or state has changed, if that norm is
        not finite.
        """
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
        return float(norm)

    def skip_step(self) -> bool:
        """See `Trainable`."""
        return self.scaling is not None and self.scaling.lower()

    def settle(self) -> None:
        """Make the parameters current: an overlapped gather leaves them stale until the next
        forward.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def wrap_model(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    settings: MegatronConfig,
    global_batch_size: int,
    data_parallel_size: int,
    pending_reads: PendingReads,
    held: Held,
    param_groups: ParamGroups,
    gradient_norm: GradientNorm,
    apart: ClippedApart | None = None,
) -> WrappedModel:
    """Wrap loaded chunks for training; the optimizer copies its fp32 main parameters from their
    current values.

    `held` are the parameters with their rows: those whose role is a matrix have weight decay,
    where none of `param_groups` says otherwise.
    `settings.optimizer.clip_grad` is the L2 norm to which the whole model's gradient, which
    `gradient_norm` computes, is clipped; 0 does not clip. What is clipped `apart` is left out of
    that. `pending_reads` are waited for before a step changes anything.
    """
    wrapped = _wrap(chunks, config, settings, data_parallel_size)
    fuse_weight_gradients(chunks)
    optimizer = get_megatron_optimizer(
        _optimizer_config(settings, config.params_dtype),
        list(wrapped),
        _overrides(held, param_groups, settings),
        use_gloo_process_groups=False,
    )
    scheduler = _scheduler(optimizer, settings, global_batch_size)
    scale = LossScale(settings.optimizer) if config.params_dtype == torch.float16 else None
    model = WrappedModel(
        wrapped, optimizer, scheduler, pending_reads, gradient_norm, apart, Stopwatch(), scale
    )
    _connect(config, model)
    # Otherwise the first forward pass would gather parameters, and wait for other replicas there.
    model.settle()
    return model


def _overrides(
    held: Held, groups: ParamGroups, settings: MegatronConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """What differs from the optimizer's settings. Replaces Megatron-Core's own rule for weight
    decay, which goes by names and numbers of dimensions: a norm whose weights differ between heads
    has two dimensions.
    """
    alike: dict[tuple[tuple[str, float], ...], set[int]] = defaultdict(set)
    for entry, tensor in held:
        own = {} if entry.row.role is Role.MATRIX else {"wd_mult": 0.0}
        if (group := groups.group_of(entry)) is not None:
            own |= _own_rates(group, settings)
        if own:
            alike[tuple(sorted(own.items()))].add(id(tensor))
    return {
        ParamKey(predicate=ParamPredicate(str(own), partial(_is_one_of, ids))): dict(own)
        for own, ids in alike.items()
    }


def _is_one_of(ids: Collection[int], parameter: torch.Tensor) -> bool:
    return id(parameter) in ids


def _own_rates(group: ParamGroupConfig, settings: MegatronConfig) -> dict[str, float]:
    optimizer, found = settings.optimizer, {}
    if group.lr is not None:
        found["max_lr"] = group.lr
        found["min_lr"] = optimizer.min_lr * group.lr / optimizer.lr if optimizer.lr else 0.0
    if group.min_lr is not None:
        found["min_lr"] = group.min_lr
    if group.weight_decay is not None:
        found |= {"start_wd": group.weight_decay, "end_wd": group.weight_decay, "wd_mult": 1.0}
    return found


def _wrap(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    settings: MegatronConfig,
    data_parallel_size: int,
) -> tuple[DistributedDataParallel, ...]:
    ddp = settings.distributed_data_parallel_config
    bucket = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * data_parallel_size)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=settings.optimizer.use_distributed_optimizer,
        average_in_collective=False,
        # It waits for the device in every backward pass, and raises on one rank alone. The norm of
        # the whole gradient, which every rank has, is checked instead (`Trainable.step`).
        check_for_nan_in_grad=False,
        bucket_size=bucket if ddp.overlap_grad_reduce else None,
    )
    # It says of every model that it computes a layout which callers could pass, by one function.
    logger = logging.getLogger(DistributedDataParallel.__module__)
    logger.addFilter(_is_news)
    try:
        return tuple(
            # Later chunks finish their backward pass first: the other chunks' compute hides one
            # large message as well as many.
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        )
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "full_param_layout not provided" not in record.getMessage()


def fuse_weight_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Let Transformer Engine's linear layers add weight gradients to the buffers in their matrix
    products. Call it once parameters have their buffers.

    Transformer Engine marks such a parameter, whose gradient Megatron-Core's hook then drops: right
    for weights that only one layer reads.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, _FUSES):
                setattr(module, _FUSES, True)


def _optimizer_config(settings: MegatronConfig, dtype: torch.dtype) -> OptimizerConfig:
    optimizer = settings.optimizer
    return OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        # fp32 main parameters. `fp16` would do the same, with a loss scaler for each optimizer.
        bf16=dtype != torch.float32,
        params_dtype=dtype,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        overlap_param_gather=settings.distributed_data_parallel_config.overlap_param_gather,
    )


def _connect(config: TransformerConfig, model: WrappedModel) -> None:
    """Give the pipeline schedule its hooks into gradient buffers and optimizer."""
    config.finalize_model_grads_func = partial(
        finalize_gradients, model.pending_reads, model.stopwatch
    )
    scale = model.scaling
    config.grad_scale_func = model.optimizer.scale_loss if scale is None else scale.scale
    if model.chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model.chunks])


def finalize_gradients(
    pending_reads: PendingReads,
    stopwatch: Stopwatch,
    model: list[Any],
    num_tokens: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Reduce gradients over ranks without the schedule's division by a token count, since the loss
    is already normalized. Afterwards a step changes what `pending_reads` read.
    """
    pending_reads.wait()
    with stopwatch.timing(REDUCE), stopwatch.recorder.span(REDUCE):
        finalize_model_grads(model, None, **kwargs)
        sum_embedding_gradients(model)


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _scheduler(
    optimizer: MegatronOptimizer, settings: MegatronConfig, global_batch_size: int
) -> OptimizerParamScheduler:
    """The schedule counts samples, as the host steps it: the config's iterations times the global
    batch size.
    """
    schedule, lr = settings.scheduler, settings.optimizer.lr
    assert schedule.lr_decay_iters is not None, "filled in with the configuration"
    decay_steps = schedule.lr_decay_iters * global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=lr,
        min_lr=settings.optimizer.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * global_batch_size,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
