"""Reads log-probabilities and top-k logits of given sequences, in the caller's rows and order.

Shapes: B rows, S positions, K candidates.
"""

from __future__ import annotations

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import current_device
from megatron_policy.errors import BatchError
from megatron_policy.train.logprobs import next_token_logprobs, vocab_parallel_topk
from megatron_policy.train.pipeline import Pipeline


def logprobs(pipeline: Pipeline, tokens_BS: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """fp32 `[B, S]` on the CPU, on every rank: position t holds `log p(token t | tokens before t)`,
    position 0 is 0.
    """

    def read(logits_BSV: torch.Tensor, data: BatchedDataDict) -> torch.Tensor:
        scores = next_token_logprobs(
            logits_BSV, data["input_ids"], pipeline.vocab_start, pipeline.groups.tp
        )
        return torch.nn.functional.pad(scores, (1, 0))

    results = pipeline.infer(_microbatches(tokens_BS, micro_batch_size), read)
    like = torch.empty(tokens_BS.shape, dtype=torch.float32, device=current_device())
    return _assemble(pipeline, results, like)


def topk_logits(
    pipeline: Pipeline, tokens_BS: torch.Tensor, k: int, micro_batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest logits after each position and their token ids, fp32 and int64 `[B, S, k]`,
    largest first.
    """
    if not 1 <= k <= pipeline.vocab_size:
        raise BatchError(
            f"k is {k}; it must lie between 1 and the vocabulary size {pipeline.vocab_size}"
        )

    def read(logits_BSV: torch.Tensor, data: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_topk(
            logits_BSV * pipeline.temperature, k, pipeline.vocab_start, pipeline.groups.tp
        )

    results = pipeline.infer(_microbatches(tokens_BS, micro_batch_size), read)
    like = torch.empty(*tokens_BS.shape, k, dtype=torch.float32, device=current_device())
    values = _assemble(pipeline, [values for values, _ in results], like)
    indices = _assemble(pipeline, [indices for _, indices in results], like.long())
    return values, indices


def _microbatches(tokens_BS: torch.Tensor, micro_batch_size: int) -> list[BatchedDataDict]:
    """Equal microbatches, as the pipeline needs them: the last row is repeated to fill the last
    one.
    """
    rows = tokens_BS.size(0)
    size = min(micro_batch_size, rows)
    missing = -rows % size
    filled_BS = torch.cat([tokens_BS, tokens_BS[-1:].expand(missing, -1)]) if missing else tokens_BS
    return [
        BatchedDataDict({"input_ids": part}) for part in filled_BS.to(current_device()).split(size)
    ]


def _assemble(pipeline: Pipeline, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The rows asked for, on the CPU of every rank of the pipeline."""
    whole = torch.cat(parts)[: like.size(0)] if pipeline.is_last_stage else None
    return pipeline.share_tensor(whole, like).cpu()
