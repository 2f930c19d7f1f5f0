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
        kept_BV = logits_BV.masked_fill(bounds.mask_dropped(logits_BV, 0), -torch.inf)
    if sampling.greedy or sampling.temperature == 0:
        tokens_B = kept_BV.argmax(-1)
    else:
        tokens_B = torch.multinomial(kept_BV.softmax(-1), 1, generator=generator).squeeze(-1)
    scored_BV = kept_BV if sampling.filter_logprobs else logits_BV
    logprobs_B1 = scored_BV.log_softmax(-1).gather(-1, tokens_B.unsqueeze(-1))
    return tokens_B, logprobs_B1.squeeze(-1)


@dataclass
class Progress:
    """Rows being generated; `position` is the next column to write, `ends_B` each row's length so
    far.
    """

    tokens_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    ends_B: torch.Tensor
    stopped_B: torch.Tensor
    position: int

    @classmethod
    def start(
        cls, prompts_BS: torch.Tensor, lengths_B: torch.Tensor, total: int, pad_id: int
    ) -> Progress:
        """Before the first token: rows of `total` positions that hold their prompts."""
        tokens_BT = prompts_BS.new_full((prompts_BS.size(0), total), pad_id)
        width = min(prompts_BS.size(1), total)
        inside = torch.arange(width, device=prompts_BS.device) < lengths_B.unsqueeze(1)
        tokens_BT[:, :width] = torch.where(inside, prompts_BS[:, :width], pad_id)
        return cls(
            tokens_BT=tokens_BT,
            logprobs_BT=torch.zeros(tokens_BT.shape, device=tokens_BT.device),
            ends_B=lengths_B.clone(),
            stopped_B=torch.zeros_like(lengths_B, dtype=torch.bool),
            position=int(lengths_B.min()),
        )

    def unfinished(self, limit_B: torch.Tensor) -> bool:
        """Whether any row can still grow."""
        return bool(((self.ends_B < limit_B) & ~self.stopped_B).any())

    def append(
        self,
        tokens_B: torch.Tensor,
        logprobs_B: torch.Tensor,
        limit_B: torch.Tensor,
        stop_ids: tuple[int, ...],
    ) -> None:
        """Write column `position` in the rows that grow: past their prompt and not finished."""
        growing_B = (self.ends_B == self.position) & ~self.stopped_B & (self.ends_B < limit_B)
        column_B = self.tokens_BT[:, self.position]
        self.tokens_BT[:, self.position] = torch.where(growing_B, tokens_B, column_B)
        self.logprobs_BT[:, self.position] = logprobs_B * growing_B
        self.ends_B += growing_B
        for stop in stop_ids:
            self.stopped_B |= growing_B & (tokens_B == stop)
        self.position += 1

    def result(self, prompt_lengths_B: torch.Tensor) -> Continuations:
        width = int(self.ends_B.max())
        return Continuations(
            tokens_BT=self.tokens_BT[:, :width].cpu(),
            lengths_B=self.ends_B.cpu(),
            generated_B=(self.ends_B - prompt_lengths_B).cpu(),
            logprobs_BT=self.logprobs_BT[:, :width].cpu(),
        )


def nothing_generated(prompts_BS: torch.Tensor) -> Continuations:
    """For no prompts, `[0, S]`."""
    tokens_BT, none_B = prompts_BS[:, :1].cpu(), torch.zeros(0, dtype=torch.long)
    return Continuations(tokens_BT, none_B, none_B, torch.zeros(tokens_BT.shape))
