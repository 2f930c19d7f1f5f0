"""Continues prompts with a sharded transformers model and its own cache.

For checks and small experiments. All ranks that share weights run the same number of forward
passes. Shapes: B rows, T positions of prompt and continuation, S positions of one forward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.engines.hugging_face.attention import attending
from megatron_policy.engines.hugging_face.decoder import Decoder
from megatron_policy.engines.hugging_face.head import FusedHead, OwnHead
from megatron_policy.engines.hugging_face.process_groups import FsdpGroups
from megatron_policy.lm_head.sampling import (
    Continuations,
    Progress,
    Sampling,
    nothing_generated,
    sample,
)


@torch.no_grad()
def generate(
    decoder: Decoder,
    head: FusedHead | OwnHead,
    groups: FsdpGroups,
    prompts_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    sampling: Sampling,
    pad_id: int,
    max_length: int,
    generator: torch.Generator,
) -> Continuations:
    """See `TrainingEngine.generate`. Ranks without prompts accompany the others."""
    lengths_B = lengths_B.to(current_device())
    with attending(None), head.whole_sequences():
        if not lengths_B.numel():
            _accompany(decoder, groups)
            return nothing_generated(prompts_BS)
        total = min(int(lengths_B.max()) + sampling.max_new_tokens, max_length)
        progress = Progress.start(prompts_BS.to(current_device()), lengths_B, total, pad_id)
        limit_B = (lengths_B + sampling.max_new_tokens).clamp(max=total)
        cache, read = _cache(decoder), 0
        while progress.unfinished(limit_B):
            _any_rank(groups, True)
            unread_BS = progress.unread(read)
            positions_S = torch.arange(read, read + unread_BS.size(1), device=unread_BS.device)
            logits_BV = decoder(
                unread_BS,
                positions_S.expand_as(unread_BS),
                head.next_logits,
                cache,
            )
            read = progress.position
            tokens_B, logprobs_B = _draw(logits_BV, sampling, generator, groups)
            progress.append(tokens_B, logprobs_B, limit_B, sampling.stop_ids)
        _accompany(decoder, groups)
    return progress.result(lengths_B)


def _cache(decoder: Decoder) -> object:
    from transformers import DynamicCache

    return DynamicCache(config=decoder.model.config)


def _any_rank(groups: FsdpGroups, unfinished: bool) -> bool:
    """Whether any of the ranks that share weights is unfinished; collective."""
    found = torch.tensor(int(unfinished), device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=groups.shards)
    return bool(found)


def _accompany(decoder: Decoder, groups: FsdpGroups) -> None:
    """Run forward passes of one token, which nobody reads, while other ranks need weights of this
    one.
    """
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=current_device())
    while _any_rank(groups, False):
        decoder(token_11, token_11, lambda hidden_SBD: hidden_SBD, _cache(decoder))


def _draw(
    logits_BV: torch.Tensor, sampling: Sampling, generator: torch.Generator, groups: FsdpGroups
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw on one rank of those that share rows; the others get the tokens and log-probabilities,
    `[B]`.
    """
    tp, cp = groups.batch.tp, groups.batch.cp
    # fp64 holds every token id exactly, so one message carries both.
    drawn_2B = torch.zeros(2, len(logits_BV), dtype=torch.float64, device=logits_BV.device)
    if tp.rank() == cp.rank() == 0:
        tokens_B, logprobs_B = sample(logits_BV, sampling, generator)
        drawn_2B = torch.stack([tokens_B.double(), logprobs_B.double()])
    if cp.size() > 1 and tp.rank() == 0:
        dist.broadcast(drawn_2B, group=cp, group_src=0)
    if tp.size() > 1:
        dist.broadcast(drawn_2B, group=tp, group_src=0)
    return drawn_2B[0].long(), drawn_2B[1].float()
