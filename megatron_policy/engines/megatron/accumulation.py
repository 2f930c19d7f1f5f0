"""Gradients added up over several runs of the pipeline schedule, and reduced once; knows neither
batches nor losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from megatron_policy.engines.megatron.optimizer import WrappedModel, finalize_gradients


def zero_gradients(model: WrappedModel) -> None:
    """No gradient in the buffers, and none beside them."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()


@contextmanager
def accumulating(model: WrappedModel) -> Iterator[None]:
    """Within this context a run of the schedule adds to each rank's own gradients and reduces
    nothing.

    The schedule would reduce in two ways. The buffers send a bucket off when the last microbatch
    has filled it, and schedules let go of `no_sync` for that one: so it is held from outside, and
    theirs does nothing. And at its end each run finalizes the gradients, whatever `no_sync` says: a
    second time that would sum what has been summed, into buffers of which a distributed optimizer's
    reduction has left this rank's share alone valid.
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
    """A schedule given no function at all would leave out more than the reduction."""


def reduce_accumulated(model: WrappedModel, factor: float) -> None:
    """Multiply what has been added up by `factor` and do all that the end of a schedule does, once:
    sum over data-parallel ranks, layer norms over tensor-parallel ones, tied embeddings over
    stages, and what routers count.
    """
    for chunk in model.chunks:
        chunk.scale_gradients(factor)
        if chunk.ddp_config.overlap_grad_reduce:
            # No microbatch has sent the buckets off.
            chunk.start_grad_sync()
    finalize_gradients(model.pending_reads, list(model.chunks))
