"""Samples next tokens from logits.

Shapes: B rows, V the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How sequences are continued: at most `max_new_tokens` each, ended by any of `stop_ids`.

    `temperature` 0 and `greedy` mean the most likely token. `top_k` keeps the k most likely tokens,
    `top_p` the smallest set of most likely tokens whose probability reaches p (Holtzman et al.
    2020); None keeps all.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
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

    They are at the policy's temperature, but of the whole distribution, before top-k and top-p.
    """
    logits_BV = logits_BV / (sampling.temperature or 1.0)
    model_logprobs_BV = logits_BV.log_softmax(-1)
    if sampling.greedy or sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
    else:
        kept_BV = _keep(logits_BV, sampling)
        tokens_B = torch.multinomial(kept_BV.softmax(-1), 1, generator=generator).squeeze(-1)
    return tokens_B, model_logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)


def _keep(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set logits outside top-k and top-p to minus infinity."""
    if sampling.top_k is not None and sampling.top_k < logits_BV.size(-1):
        least_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probability_BV = sorted_BV.softmax(-1)
        before_BV = probability_BV.cumsum(-1) - probability_BV
        sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, -torch.inf)
        logits_BV = torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
    return logits_BV
