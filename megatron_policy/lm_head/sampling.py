"""Samples next tokens from logits.

Shapes: B rows, V the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_policy.lm_head.filters import Filters, find_bounds


@dataclass(frozen=True)
class Sampling:
    """How sequences are continued: at most `max_new_tokens` each, ended by any of `stop_ids`.

    `temperature` 0 and `greedy` mean the most likely token. Tokens are drawn from what `filters`
    keep, None everything; log-probabilities are of that too, or of the whole distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    filters: Filters | None = None
    filter_logprobs: bool = True
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Continuations:
    """Prompts with their continuations, right padded: tokens `[B, T]`, lengths `[B]`,
    log-probabilities `[B, T]`.

    `generated_B` counts new tokens, including a stop token. Log-probabilities are fp32, equal to
    those of scoring the same tokens afterwards, 0 at prompt and padding positions. (If rotary
    frequencies depend on the text length: equal to those of scoring the tokens before each.)
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor
    generated_B: torch.Tensor
    logprobs_BT: torch.Tensor


def sample(
    logits_BV: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens int64 `[B]` and their log-probabilities fp32 `[B]`, as in `policy.logprobs`.

    They are at the policy's temperature, and of what the filters keep or of the whole distribution.
    """
    logits_BV = logits_BV / (sampling.temperature or 1.0)
    kept_BV = logits_BV
    if sampling.filters is not None:
        bounds = find_bounds(logits_BV, 0, logits_BV.size(-1), sampling.filters)
        kept_BV = logits_BV.masked_fill(bounds.dropped(logits_BV, 0), -torch.inf)
    if sampling.greedy or sampling.temperature == 0:
        tokens_B = kept_BV.argmax(-1)
    else:
        tokens_B = torch.multinomial(kept_BV.softmax(-1), 1, generator=generator).squeeze(-1)
    scored_BV = kept_BV if sampling.filter_logprobs else logits_BV
    logprobs_B1 = scored_BV.log_softmax(-1).gather(-1, tokens_B.unsqueeze(-1))
    return tokens_B, logprobs_B1.squeeze(-1)
