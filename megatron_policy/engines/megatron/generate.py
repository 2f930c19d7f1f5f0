"""Continues prompts with the policy itself, with a KV cache, under tensor and pipeline parallelism.

For checks and small experiments; use an inference engine for rollouts at scale. All rows advance by
one position at a time from the end of the shortest prompt; tokens of longer prompts are fed
unchanged.

Shapes: B rows, T positions of prompt and continuation, S positions of one forward pass, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_policy.device import current_device
from megatron_policy.engines.megatron.layers.rope import outgrown
from megatron_policy.engines.megatron.pipeline import Pipeline, hidden_states_of
from megatron_policy.lm_head.logprobs import gather_vocab
from megatron_policy.lm_head.sampling import (
    Continuations,
    Progress,
    Sampling,
    nothing_generated,
    sample,
)


@torch.no_grad()
def generate(
    pipeline: Pipeline,
    prompts_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    sampling: Sampling,
    pad_id: int,
    max_length: int,
    generator: torch.Generator,
) -> Continuations:
    """Continue right-padded prompts up to at most `max_length` positions; every rank gets the
    result, on the CPU.

    All rows share a KV cache. Only one rank of each data-parallel replica draws from `generator`,
    so its state need not agree between ranks. Replicas that use each other's experts call this
    together, each with its own prompts or with none.
    """
    lengths_B = lengths_B.to(current_device())
    if not lengths_B.numel():
        _accompany(pipeline)
        return nothing_generated(prompts_BS)
    total = min(int(lengths_B.max()) + sampling.max_new_tokens, max_length)
    progress = Progress.start(prompts_BS.to(current_device()), lengths_B, total, pad_id)
    limit_B = (lengths_B + sampling.max_new_tokens).clamp(max=total)
    cache = StaticInferenceContext(prompts_BS.size(0), total)
    with _inference_mode(pipeline):
        while progress.unfinished(limit_B):
            _any_replica(pipeline, True)
            if outgrown(pipeline.models, cache.sequence_len_offset, progress.position):
                cache.sequence_len_offset = 0  # recompute the cache for the text so far
                cache.enable_prefill_mode()
            logits_BV = _relay(pipeline, progress.unread(cache.sequence_len_offset), cache)
            tokens_B, logprobs_B = _draw(
                pipeline, logits_BV, sampling, generator, prompts_BS.size(0)
            )
            cache.sequence_len_offset = progress.position
            cache.enable_decode_mode()
            progress.append(tokens_B, logprobs_B, limit_B, sampling.stop_ids)
    _accompany(pipeline)
    return progress.result(lengths_B)


def _any_replica(pipeline: Pipeline, unfinished: bool) -> bool:
    """Whether any of the replicas that use each other's experts is unfinished; collective then."""
    if not pipeline.topology.joins_replicas:
        return unfinished
    found = torch.tensor(int(unfinished), device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=pipeline.groups.dp)
    return bool(found)


def _accompany(pipeline: Pipeline) -> None:
    """Run forward steps of one token, which nobody reads, while other replicas need experts of this
    replica.
    """
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=current_device())
    with _inference_mode(pipeline):
        while _any_replica(pipeline, False):
            _relay(pipeline, token_11, StaticInferenceContext(1, 1))


def _relay(
    pipeline: Pipeline, tokens_BS: torch.Tensor, cache: StaticInferenceContext
) -> torch.Tensor | None:
    """Pass one forward step from chunk to chunk; returns the logits `[B, V]` of the last position
    on the last stage.
    """
    rows, positions = tokens_BS.shape
    offset = cache.sequence_len_offset
    positions_BS = torch.arange(offset, offset + positions, device=tokens_BS.device).expand(
        rows, -1
    )
    pp, output = pipeline.groups.pp, None
    chunk: Any
    for chunk in pipeline.models:
        first, last = chunk.pre_process, chunk.post_process
        if not first and pp.size() > 1:
            config = chunk.config
            hidden_SBD = torch.empty(
                positions,
                rows,
                config.hidden_size,
                dtype=config.params_dtype,
                device=tokens_BS.device,
            )
            dist.recv(hidden_SBD, group=pp, group_src=(pp.rank() - 1) % pp.size())
            chunk.set_input_tensor(hidden_SBD)
        with hidden_states_of(chunk):
            output = chunk(
                tokens_BS, positions_BS, None, inference_context=cache, runtime_gather_output=True
            )
        if not last:
            dist.send(output.contiguous(), group=pp, group_dst=(pp.rank() + 1) % pp.size())
    if pipeline.head is None or output is None:
        return None
    logits_1BV = pipeline.head.plain.logits(output[-1:])
    return gather_vocab(logits_1BV[0], pipeline.groups.tp)[:, : pipeline.vocab_size]


def _draw(
    pipeline: Pipeline,
    logits_BV: torch.Tensor | None,
    sampling: Sampling,
    generator: torch.Generator,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw on one rank; its whole replica gets the tokens and log-probabilities, both `[B]`."""
    # fp64 holds every token id exactly, so one message carries both.
    drawn_2B = torch.zeros(2, rows, dtype=torch.float64, device=current_device())
    tp, cp = pipeline.groups.tp, pipeline.groups.cp
    if logits_BV is not None:
        if tp.rank() == cp.rank() == 0:
            tokens_B, logprobs_B = sample(logits_BV, sampling, generator)
            drawn_2B = torch.stack([tokens_B.double(), logprobs_B.double()])
        if cp.size() > 1 and tp.rank() == 0:
            dist.broadcast(drawn_2B, group=cp, group_src=0)
        if tp.size() > 1:
            dist.broadcast(drawn_2B, group=tp, group_src=0)
    drawn_2B = pipeline.share_tensor(drawn_2B if pipeline.is_last_stage else None, drawn_2B)
    return drawn_2B[0].long(), drawn_2B[1].float()


@contextmanager
def _inference_mode(pipeline: Pipeline) -> Iterator[None]:
    """Eval mode, and no sequence parallelism: one position cannot be split."""
    for chunk in pipeline.models:
        chunk.eval()
    with _without_sequence_parallelism(pipeline.models):
        yield


@contextmanager
def _without_sequence_parallelism(chunks: tuple[torch.nn.Module, ...]) -> Iterator[None]:
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    modules = [module for chunk in chunks for module in chunk.modules()]
    holders = {id(x): x for m in modules for x in (m, getattr(m, "config", None)) if x is not None}
    switched = [
        (x, name) for x in holders.values() for name in names if getattr(x, name, None) is True
    ]
    for holder, name in switched:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in switched:
            setattr(holder, name, True)
