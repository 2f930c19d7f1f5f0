"""Gradient buffers, optimizer and learning-rate schedule around model chunks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from megatron_policy.converters.rows import DECAYED
from megatron_policy.device.timing import Stopwatch
from megatron_policy.engines.megatron.mtp import sum_embedding_gradients
from megatron_policy.interfaces.engine import REDUCE
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.weights.load import Held

# Megatron-LM's own default: buckets large enough to saturate the network, growing with the ring.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
_FUSES = "fuse_wgrad_accumulation"
"""What Transformer Engine names it."""


def make_optimizer(
    wrapped: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    settings: MegatronConfig,
    held: Held,
    param_groups: ParamGroups,
) -> MegatronOptimizer:
    """The optimizer over wrapped chunks, whose parameters are of `dtype`; it copies its fp32 main
    parameters from their current values. `held` are the parameters with their rows: those whose
    role is a matrix have weight decay, where none of `param_groups` says otherwise.
    """
    optimizer = settings.optimizer
    config = OptimizerConfig(
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
    overrides = _find_overrides(held, param_groups, settings)
    return get_megatron_optimizer(config, list(wrapped), overrides, use_gloo_process_groups=False)


def _find_overrides(
    held: Held, groups: ParamGroups, settings: MegatronConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """What differs from the optimizer's settings. Replaces Megatron-Core's own rule for weight
    decay, which goes by names and numbers of dimensions: a norm whose weights differ between heads
    has two dimensions.
    """
    alike: dict[tuple[tuple[str, float], ...], set[int]] = defaultdict(set)
    for entry, tensor in held:
        own = {} if entry.row.role in DECAYED else {"wd_mult": 0.0}
        if (group := groups.group_of(entry)) is not None:
            own |= _find_rates(group, settings)
        if own:
            alike[tuple(sorted(own.items()))].add(id(tensor))
    return {
        ParamKey(predicate=ParamPredicate(str(own), lambda p, ids=ids: id(p) in ids)): dict(own)
        for own, ids in alike.items()
    }


def _find_rates(group: ParamGroupConfig, settings: MegatronConfig) -> dict[str, float]:
    optimizer, found = settings.optimizer, {}
    if group.lr is not None:
        found["max_lr"] = group.lr
        found["min_lr"] = optimizer.min_lr * group.lr / optimizer.lr if optimizer.lr else 0.0
    if group.min_lr is not None:
        found["min_lr"] = group.min_lr
    if group.weight_decay is not None:
        found |= {"start_wd": group.weight_decay, "end_wd": group.weight_decay, "wd_mult": 1.0}
    return found


def wrap_chunks(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    settings: MegatronConfig,
    data_parallel_size: int,
) -> tuple[DistributedDataParallel, ...]:
    """Loaded chunks in their gradient buffers."""
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


def make_scheduler(
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
