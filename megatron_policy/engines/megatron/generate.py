"""A Megatron-Core model with a cache of keys and values, under tensor and pipeline parallelism.

Shapes: B rows, T positions of prompt and continuation, S positions of one forward pass, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.engines.megatron.layers.rope import outgrown
from megatron_policy.engines.megatron.layers.sequences import (
    PromptCache,
    SequenceParams,
    sequence_params,
)
from megatron_policy.engines.megatron.pipeline import Pipeline, hidden_states_of
from megatron_policy.engines.shared import GrowingRows
from megatron_policy.lm_head.logprobs import gather_vocab
from megatron_policy.packing.tokens import padded_layout


class CachedPipeline:
    """See `CachedModel`."""

    def __init__(self, pipeline: Pipeline, prompts: BatchedDataDict, positions: int) -> None:
        """See `NewCache`."""
        self._pipeline = pipeline
        self._cache = PromptCache(prompts.size, positions)
        self._prompts = GrowingRows.of(pipeline.embedder, prompts, positions, time=0)
        if (positions_BT := self._prompts.positions) is not None:
            self._cache.positions_TR = positions_BT.transpose(0, 1)

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor | None:
        """See `CachedModel`; replicas that use each other's experts call it together."""
        cache = self._cache
        if outgrown(self._pipeline.models, cache.sequence_len_offset, position):
            cache.sequence_len_offset = 0  # recompute the cache for the text so far
            cache.enable_prefill_mode()
        logits_BV = self._relay(tokens_BT[:, cache.sequence_len_offset : position])
        cache.sequence_len_offset = position
        cache.enable_decode_mode()
        return logits_BV

    def _relay(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """Pass one forward step from chunk to chunk; returns the logits `[B, V]` of the last
        position on the last stage.
        """
        pipeline, (rows, positions) = self._pipeline, tokens_BS.shape
        pp, output = pipeline.groups.pp, None
        sequences = None if self._cache.sequence_len_offset else self._find_blocks(positions)
        chunk: Any
        for chunk in pipeline.models:
            if not chunk.pre_process and pp.size() > 1:
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
            entering = None
            if chunk.pre_process:
                # What further layers add is left in the cache.
                first = self._cache.sequence_len_offset
                entering, self._cache.deep = self._prompts.enter(tokens_BS, first)
            with hidden_states_of(chunk):
                output = chunk(
                    tokens_BS,
                    None,
                    None,
                    entering,
                    inference_context=self._cache,
                    packed_seq_params=sequences,
                    runtime_gather_output=True,
                )
            if not chunk.post_process:
                dist.send(output.contiguous(), group=pp, group_dst=(pp.rank() + 1) % pp.size())
        if pipeline.head is None or output is None:
            return None
        logits_1BV = pipeline.head.plain.logits(output[-1:])
        return gather_vocab(logits_1BV[0], pipeline.groups.tp)[:, : pipeline.vocab_size]

    def _find_blocks(self, width: int) -> SequenceParams | None:
        """What layers are passed with the first `width` tokens of all rows if some of these see
        later ones, which are all among them; None if there are none.
        """
        if not (blocks_B := self._prompts.blocks):
            return None
        layout = padded_layout(self._prompts.prompts.layout.rows, width, 1, 1).moved(to_device)
        positions_BT = self._prompts.positions
        first_BS = None if positions_BT is None else positions_BT[:, :width]
        return sequence_params(layout, self._pipeline.groups.cp, first_BS, (), blocks_B)


@contextmanager
def inference_mode(pipeline: Pipeline) -> Iterator[None]:
    """Eval mode, and no sequence parallelism: one position cannot be split."""
    for chunk in pipeline.models:
        chunk.eval()
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    modules = [module for chunk in pipeline.models for module in chunk.modules()]
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
