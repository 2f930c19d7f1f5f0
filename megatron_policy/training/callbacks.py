"""What callbacks of a step in pieces get of each microbatch.

Shapes: B rows of a microbatch, S positions of its widest, K vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import counted, inside


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
    def of(
        cls,
        output: Output,
        *,
        entropy: bool = False,
        everywhere: bool = False,
        candidates: str = "",
    ) -> TokenScores:
        """Those of tokens that count by `token_mask` and `sample_mask`, or `everywhere` in the
        text.
        """
        microbatch, host = output.microbatch, output.microbatch.host.data
        found = cls(microbatch.data, microbatch.rows)
        if output.head.scalar is not None:
            return replace(found, values=output.values(inside(host)))
        wanted_BS = inside(host) if everywhere else counted(host)
        if candidates not in microbatch.data:
            logprobs, entropies = output.next_token_scores(wanted_BS, entropy)
            return replace(found, logprobs=logprobs, entropy=entropies)
        entries_BSK = microbatch.data[candidates]
        scores, logprobs, entropies = output.candidate_scores(entries_BSK, wanted_BS, entropy)
        return replace(found, logprobs=logprobs, entropy=entropies, candidates=scores)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The scores that there are."""
        found = (self.logprobs, self.entropy, self.values, self.candidates)
        return [each for each in found if each is not None]
