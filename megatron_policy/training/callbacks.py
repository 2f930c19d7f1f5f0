"""What callbacks of a step in pieces get of each microbatch, and what becomes of their errors.

Shapes: B rows of a microbatch, S positions of its widest, K vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import Microbatch, counted, inside
from megatron_policy.training.faults import Fault, any_fault, raise_everywhere
from megatron_policy.training.loss_calls import Wrong, name_of, raised

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """Which scores a callback gets: of tokens that count, or `everywhere` in the text, with the
    `entropy`, and with those of the entries that the data have under the key `candidates`.
    """

    entropy: bool = False
    everywhere: bool = False
    candidates: str = ""


@dataclass(frozen=True)
class TokenScores:
    """What a callback gets of one microbatch on the last stage: its rows on the device, and their
    numbers in the data they were cut from.

    A language model has `logprobs`, fp32 `[B, S - 1]`, whose position t is the log-probability of
    token t + 1 at the row's temperature, and `entropy` in nats likewise, if asked for; both are 0
    where token t + 1 does not count. Where the data have vocabulary entries under the key
    `candidates` that the caller names, `[B, S, K]`, those after position t have log-probabilities
    `candidates`, `[B, S - 1, K]`. A scalar head has `values`, fp32 `[B, S]`; 0 beyond the text.
    All are differentiable, and the same on every tensor- and context-parallel rank.
    """

    data: BatchedDataDict
    rows: tuple[int, ...]
    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    candidates: torch.Tensor | None = None

    @classmethod
    def of(cls, output: Output, wanted: Wanted) -> TokenScores:
        """Those of tokens that count by `token_mask` and `sample_mask`, or `everywhere` in the
        text.
        """
        microbatch = output.microbatch
        whole_BS = inside(microbatch.host.data)
        found = cls(microbatch.data, microbatch.rows)
        if output.head.scalar is not None:
            return replace(found, values=output.values(whole_BS))
        wanted_BS = whole_BS if wanted.everywhere else counted(microbatch.host.data)
        if wanted.candidates in microbatch.data:
            entries_BSK = microbatch.data[wanted.candidates]
            scores = output.candidate_scores(entries_BSK, wanted_BS, wanted.entropy)
            found = replace(found, candidates=scores[0])
            logprobs, entropies = scores[1:]
        else:
            logprobs, entropies = output.next_token_scores(wanted_BS, wanted.entropy)
        return replace(found, logprobs=logprobs, entropy=entropies)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The scores that there are."""
        found = (self.logprobs, self.entropy, self.values, self.candidates)
        return [each for each in found if each is not None]


def reader(
    read: Callable[[TokenScores], T], wanted: Wanted
) -> Callable[[Output], tuple[T | None, list[Wrong]]]:
    """Call `read` with the scores of a microbatch; what it raises is kept."""

    def finish(output: Output) -> tuple[T | None, list[Wrong]]:
        try:
            return read(TokenScores.of(output, wanted)), []
        except Exception as error:
            return None, [raised(name_of(read), error)]

    return finish


def raise_callbacks_errors(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    wrong: Sequence[Sequence[Wrong]],
    consequence: str,
) -> None:
    """LossError on every rank if a microbatch of any of them has something wrong."""
    rows = [each.rows for each in microbatches if not each.filler]
    replica = engine.groups.dp.rank()
    faults = [
        Fault(0, replica, place, rows[place], each.what, each.trace)
        for place, several in enumerate(wrong)
        for each in several
    ]
    faults = engine.share_object(faults if engine.is_last_stage else None)
    if any_fault(faults, engine.groups):
        raise_everywhere(faults, engine.groups, consequence)


def not_finite(loss: Callable[..., object], value: float) -> list[Wrong]:
    """What is wrong with the value of a loss; nothing if it is finite."""
    if math.isfinite(value):
        return []
    return [Wrong(f"{name_of(loss)} returned {value}, which is not finite")]
