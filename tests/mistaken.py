"""Losses that go wrong on one rank, at one microbatch, as users write them by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.losses import LogitEntropy, Result, SequenceNLL, TokenNLL

KINDS = {"token": TokenNLL, "sequence": SequenceNLL, "logit": LogitEntropy}


def raises(loss: torch.Tensor, metrics: dict[str, Any]) -> Any:
    raise ArithmeticError("the reward model has no answer")


MISTAKES: dict[str, tuple[Callable[[torch.Tensor, dict[str, Any]], Any], str]] = {
    "raises": (raises, "raised ArithmeticError: the reward model has no answer (mistaken.py, line"),
    "NaN": (lambda loss, metrics: (loss * float("nan"), metrics), "returned nan, which is not"),
    "a constant NaN": (lambda loss, metrics: (loss + float("nan"), metrics), "returned nan"),
    "infinite": (lambda loss, metrics: (loss / 0.0, metrics), "inf, which is not finite"),
    "detached": (lambda loss, metrics: (loss.detach(), metrics), "is detached from the model"),
    "detached, with a gradient of its own": (
        lambda loss, metrics: (loss.detach().requires_grad_(), metrics),
        "is detached from the model",
    ),
    "a float": (lambda loss, metrics: (loss.item(), metrics), "which is not a scalar"),
    "a vector": (lambda loss, metrics: (loss * torch.ones(3), metrics), "of shape (3,)"),
    "no metrics": (lambda loss, metrics: loss, "returned a Tensor: a loss returns"),
    "None": (lambda loss, metrics: None, "returned a NoneType: a loss returns"),
    "metrics in a list": (lambda loss, metrics: (loss, [1]), "as its metrics a list"),
    "a word among metrics": (lambda loss, metrics: (loss, {"note": "x"}), "the metric 'note' as a"),
    "a nameless metric": (lambda loss, metrics: (loss, {3: 1.0}), "a metric under 3"),
}
READING = {name: each for name, each in MISTAKES.items() if "detached" not in name}
"""Where nothing is trained, a loss need not have a gradient."""


class Mistaken:
    """A loss of one of the KINDS that makes a mistake on `rank` when it is called the `call`-th
    time there, from 0; it draws a random number on that rank alone.
    """

    def __init__(self, kind: str, mistake: str, rank: int, call: int = 1) -> None:
        self.inner, self.mistake, self.rank, self.left = KINDS[kind](), mistake, rank, call
        self.loss_type = self.inner.loss_type
        if hasattr(self.inner, "input_type"):
            self.input_type = self.inner.input_type

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        found = self.inner(*args, **kwargs)
        mine = dist.get_rank() == self.rank
        self.left -= mine
        if mine and self.left < 0:
            torch.rand(1)
        return MISTAKES[self.mistake][0](*found) if mine and self.left == -1 else found


class NoGradientOfSqrt(SequenceNLL):
    """Finite, but its derivative is infinite times 0 where a token is masked out: everywhere on
    `rank`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        loss, metrics = super().__call__(*args, **kwargs)
        if dist.get_rank() == self.rank:
            loss = loss + (kwargs["next_token_logprobs"] * 0).abs().sqrt().sum()
        return loss, metrics
