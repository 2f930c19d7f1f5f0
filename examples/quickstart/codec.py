"""Converts between the task's words and the policy's tensors.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_policy import BatchedDataDict

from .settings import Lengths
from .task import Question


class Codec:
    """Problems and answers as right-padded tokens, and back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def prompts(self, problems: Sequence[Question]) -> BatchedDataDict:
        """The input of `generate`: `input_ids` `[B, S]` and `input_lengths` `[B]`."""
        return self._padded([self._prompt(problem) for problem in problems])

    def demonstrations(
        self, problems: Sequence[Question], answers: Sequence[str]
    ) -> BatchedDataDict:
        """The input of `train` to learn the answers (and their end), not the prompts."""
        heads = [self._prompt(problem) for problem in problems]
        tails = [self._answer(answer) for answer in answers]
        batch = self._padded([head + tail for head, tail in zip(heads, tails, strict=True)])
        starts_B = torch.tensor([len(head) for head in heads])
        return with_masks(batch, starts_B)

    def answers(self, generated: BatchedDataDict, starts_B: Tensor) -> list[str]:
        """The texts that `generate` has added to prompts of `starts_B` tokens."""
        ends_B = generated["unpadded_sequence_lengths"]
        rows = zip(generated["output_ids"], starts_B.tolist(), ends_B.tolist(), strict=True)
        return [
            self.tokenizer.decode(tokens_S[start:end], skip_special_tokens=True)
            for tokens_S, start, end in rows
        ]

    def lengths(self, problems: Sequence[Question]) -> Lengths:
        """The most tokens of a prompt and of an answer."""
        prompts = [len(self._prompt(problem)) for problem in problems]
        answers = [len(self._answer(problem.answer)) for problem in problems]
        return Lengths(max(prompts), max(answers))

    def _prompt(self, problem: Question) -> list[int]:
        tokens: list[int] = self.tokenizer(problem.prompt)["input_ids"]
        return tokens

    def _answer(self, text: str) -> list[int]:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*tokens, self.tokenizer.eos_token_id]

    def _padded(self, rows: list[list[int]]) -> BatchedDataDict:
        width = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        filled = [row + [pad] * (width - len(row)) for row in rows]
        lengths = [len(row) for row in rows]
        return BatchedDataDict(
            {"input_ids": torch.tensor(filled), "input_lengths": torch.tensor(lengths)}
        )


def with_masks(batch: BatchedDataDict, starts_B: Tensor) -> BatchedDataDict:
    """`batch` with `token_mask` `[B, S]`, 1 from `starts_B` to the row's end, and `sample_mask`."""
    rows, width = batch["input_ids"].shape
    position_S = torch.arange(width)
    after_B1, before_B1 = starts_B.unsqueeze(1), batch["input_lengths"].unsqueeze(1)
    inside_BS = (position_S >= after_B1) & (position_S < before_B1)
    masks = {"token_mask": inside_BS.float(), "sample_mask": torch.ones(rows)}
    return BatchedDataDict({**batch, **masks})
