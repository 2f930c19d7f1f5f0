"""Gradients accumulated over several runs of the pipeline schedule and reduced once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from megatron_policy.engines.megatron.optimizer import WrappedModel, finalize_gradients


def zero_gradients(model: WrappedModel) -> None:
    """Zero the gradient buffers and drop gradients held elsewhere."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()


@contextmanager
def accumulating(model: WrappedModel) -> Iterator[None]:
    """Within this context a run of the schedule adds to each rank's own gradients and reduces
    nothing.

    The schedule would reduce in two ways. First, a gradient bucket is sent when the last microbatch
    has filled it, and schedules leave `no_sync` for that one. Here `no_sync` is held from outside
    and theirs does nothing. Second, each run finalizes the gradients at its end, regardless of
    `no_sync`. A second run would sum already summed values, in buffers where a distributed
    optimizer's reduction has left only this rank's share valid.
    """
    config = model.chunks[0].config
    hooks = (config.no_sync_func, config.finalize_model_grads_func)
    with ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())
        config.no_sync_func, config.finalize_model_grads_func = nullcontext, _reduce_nothing
        try:
            yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = hooks


def _reduce_nothing(*args: Any, **kwargs: Any) -> None:
    """With no function at all, a schedule would omit more than the reduction."""


def reduce_accumulated(model: WrappedModel, factor: float) -> None:
    """Multiply the accumulated gradients by `factor` and do once what a schedule does at its end:
    sum over data-parallel ranks, layer norms over tensor-parallel ranks, tied embeddings over
    stages, and the routers' counts.
    """
    for chunk in model.chunks:
        chunk.scale_gradients(factor)
        if chunk.ddp_config.overlap_grad_reduce:
            # No microbatch has sent the buckets.
            chunk.start_grad_sync()
    finalize_gradients(model.pending_reads, list(model.chunks))
