"""One microbatch's hidden states at the end of the pipeline, converted to results in the caller's
rows.

Shapes: B rows and S positions of the caller's microbatch; C context-parallel ranks, T positions and
R rows of what one of them computes; D model, V this rank's slice of the vocabulary, N chosen
positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.lm_head.head import LanguageModelHead, MtpLayers
from megatron_policy.packing.microbatch import TEMPERATURE, Microbatch, cut, inside
from megatron_policy.packing.multiples import NARROWEST
from megatron_policy.packing.tokens import FILLER
from megatron_policy.parallel.groups import exchange, gather, take_part

Watch = Callable[[torch.Tensor], object]
"""Gets log-probabilities without their graph, before those of dropped tokens are replaced."""


@dataclass(frozen=True)
class Output:
    """What a loss or a scoring function is given on the last stage. Results are the same on every
    tensor- and context-parallel rank.

    Masks `wanted_BS` say where results are wanted. They belong in host memory, as those made from
    `microbatch.host` are: for others the host waits for the device.
    """

    hidden_TRD: torch.Tensor
    microbatch: Microbatch
    head: LanguageModelHead
    context_group: dist.ProcessGroup
    mtp: MtpLayers | None = None

    @property
    def unfiltered(self) -> Output:
        """The same, with the scores of whole distributions; itself if there are no filters."""
        head = self.head.unfiltered
        return self if head is self.head else replace(self, head=head)

    def next_token_scores(
        self,
        wanted_BS: torch.Tensor,
        entropy: bool = False,
        watch: Watch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 `[B, S - 1]`: the log-probability of token t + 1 given those up to t, and the
        entropy of the distribution it is drawn from; 0 where `wanted_BS[:, t + 1]` is not set. If
        the filters drop token t + 1, its log-probability is 0 without a gradient, as the host's;
        `watch` gets minus infinity there, and elsewhere the same.
        """
        logprobs_BS1, entropy_BS = self._scores(self._next_tokens(), wanted_BS, entropy)
        logprobs_BS = logprobs_BS1.squeeze(-1)
        if watch is not None:
            watch(logprobs_BS.detach())
        if self.unfiltered is not self:
            logprobs_BS = logprobs_BS.masked_fill(logprobs_BS == -torch.inf, 0.0)
        return logprobs_BS, entropy_BS

    def mtp_scores(self, wanted_BS: torch.Tensor) -> list[torch.Tensor]:
        """fp32 `[B, S - 1]` for k = 1, 2, ...: the log-probability that the k-th of the further
        tokens has at temperature 1, token t + k + 1 given those up to t + k; 0 where
        `wanted_BS[:, t + k + 1]` is not set. Empty without layers for multi-token prediction.
        """
        found = []
        for number, output in enumerate(self._mtp_outputs(), start=1):
            targets_BS1 = shifted(self.microbatch.tokens_BS, number + 1).unsqueeze(-1)
            logprobs_BS1, _ = output._scores(targets_BS1, shifted(wanted_BS, number), False)
            found.append(logprobs_BS1.squeeze(-1))
        return found

    def candidate_scores(
        self,
        entries_BSK: torch.Tensor,
        wanted_BS: torch.Tensor,
        entropy: bool = False,
        watch: Watch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """fp32 `[B, S - 1, K]`: the log-probabilities of the vocabulary entries `entries_BSK[:, t]`
        after the tokens up to t, as `topk` numbers positions, without filters; 0 where
        `wanted_BS[:, t + 1]` is not set. Then the results of `next_token_scores`, for which logits
        are computed again only if there are filters.
        """
        if self.unfiltered is not self:
            found_BSK, _ = self.unfiltered._scores(entries_BSK.long(), wanted_BS, False)
            return found_BSK, *self.next_token_scores(wanted_BS, entropy, watch)
        targets_BSK = torch.cat([entries_BSK.long(), self._next_tokens()], dim=-1)
        logprobs_BSK, entropy_BS = self._scores(targets_BSK, wanted_BS, entropy)
        if watch is not None:
            watch(logprobs_BSK[..., -1].detach())
        return logprobs_BSK[..., :-1], logprobs_BSK[..., -1], entropy_BS

    def values(self, wanted_BS: torch.Tensor) -> torch.Tensor:
        """fp32 `[B, S]`: what a scalar head makes of the tokens up to each position; 0 where
        `wanted_BS` is not set.
        """
        chosen_N = self._find_wanted(wanted_BS)
        return self._put(self._values(chosen_N), chosen_N)

    def row_scores(self) -> torch.Tensor:
        """fp32 `[B]`: what a scalar head makes of each row, at its last token."""
        inside_BS = inside(self.microbatch.host.data)
        return self.values(inside_BS & (shifted(inside_BS.long(), 1) == 0)).sum(-1)

    def topk(self, k: int, wanted_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits after each wanted position at temperature 1, fp32, and their
        entries, int64: `[B, S, K]`.
        """
        chosen_N = self._find_wanted(wanted_BS)
        values_NK, indices_NK = self.head.plain.topk(self._hidden(chosen_N), k)
        return self._put(values_NK, chosen_N), self._put(indices_NK, chosen_N)

    def logits(self, at_once: int = 1) -> Iterator[tuple[BatchedDataDict, torch.Tensor]]:
        """This rank's slice of the logits, fp32 `[b, s, V]`, with the rows of data they belong to:
        all rows, or `at_once` of them at a time if they are packed, padded to the longest of these.
        `at_once` divides B.
        """
        temperatures = self.microbatch.temperatures
        if temperatures:
            one = replace(
                self, head=self.head.at(1.0), microbatch=self.microbatch.at_policy_temperature
            )
            for data, logits_BSV in one.logits(at_once):
                yield data, logits_BSV / data[TEMPERATURE].float().view(-1, 1, 1)
            return
        mine_TRV = self.head.logits(self.hidden_TRD)
        layout, data = self.microbatch.layout, self.microbatch.data
        if layout.plain and layout.width <= mine_TRV.size(0):
            yield data, mine_TRV[: layout.width].transpose(0, 1)
            return
        all_CTRV = _gather_copies(mine_TRV, self.context_group)
        if not self.microbatch.packed:
            yield data, layout.put(all_CTRV)
            return
        flat = all_CTRV.flatten(0, 2)
        lengths = (self.microbatch.host.layout.where_BS != FILLER).sum(1).tolist()
        for first in range(0, layout.rows, at_once):
            end = first + at_once
            length = max(*lengths[first:end], NARROWEST)
            where_BS = layout.where_BS[first:end, :length]
            missing_BS1 = (where_BS == FILLER).unsqueeze(-1)
            logits_BSV = flat[where_BS.clamp(min=0)].masked_fill_(missing_BS1, 0)
            yield cut(data.slice(first, end), length), logits_BSV

    def nothing(self) -> torch.Tensor:
        """A zero that depends on every parameter, so that all of them get a gradient of zero."""
        none = self.hidden_TRD.new_zeros(0, dtype=torch.long)
        if self.head.scalar is not None:
            return self._values(none).sum()
        logprobs_N, _ = self.head.scores(self._hidden(none), none)
        for output in self._mtp_outputs():
            logprobs_N = logprobs_N.sum() + output.nothing()
        return logprobs_N.sum()

    def _mtp_outputs(self) -> list[Output]:
        """What predicts each of the further tokens."""
        if self.mtp is None:
            return []
        states = self.mtp.hidden_states(self.hidden_TRD, self.microbatch)
        own = self.microbatch.at_policy_temperature  # these layers always have 1
        return [
            replace(self, hidden_TRD=each, head=self.mtp.head, mtp=None, microbatch=own)
            for each in states
        ]

    def _next_tokens(self) -> torch.Tensor:
        """The token each position predicts, `[B, S, 1]`: that of the next position."""
        return shifted(self.microbatch.tokens_BS, 1).unsqueeze(-1)

    def _scores(
        self, targets_BSK: torch.Tensor, wanted_BS: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities `[B, S - 1, K]` of `targets_BSK[:, t]` and entropies `[B, S - 1]` after
        the tokens up to t, where token t + 1 is wanted, each row at its temperature.
        """
        hidden_ND = self.head.whole(self.hidden_TRD).flatten(0, 1)
        score = partial(self._scores_at, hidden_ND, targets_BSK, entropy)
        parts = [
            score(self.head.at(value), wanted_BS.cpu() & rows_B.unsqueeze(1))
            for value, rows_B in self.microbatch.temperatures
        ]
        if not parts:
            return score(self.head, wanted_BS)
        # A row is in one of them and 0 in the others.
        logprobs, entropies = zip(*parts, strict=True)
        return sum(logprobs[1:], logprobs[0]), sum(entropies[1:], entropies[0]) if entropy else None

    def _scores_at(
        self,
        hidden_ND: torch.Tensor,
        targets_BSK: torch.Tensor,
        entropy: bool,
        head: LanguageModelHead,
        wanted_BS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same by this head, whatever temperature rows have."""
        chosen_N = self._find_wanted(shifted(wanted_BS, 1))
        targets_TRK = self.microbatch.layout.take(targets_BSK, self.context_group.rank())
        targets_NK = targets_TRK.flatten(0, 1)[chosen_N]
        logprobs_NK, entropy_N = head.scores(hidden_ND[chosen_N], targets_NK, entropy)
        logprobs_BSK = self._put(logprobs_NK, chosen_N)[:, :-1]
        return logprobs_BSK, None if entropy_N is None else self._put(entropy_N, chosen_N)[:, :-1]

    def _find_wanted(self, wanted_BS: torch.Tensor) -> torch.Tensor:
        """This rank's wanted positions among its `T * R`, int64 `[N]`, found on the host."""
        layout = self.microbatch.host.layout
        wanted_TR = layout.take(wanted_BS.cpu().long(), self.context_group.rank())
        return to_device(wanted_TR.flatten().nonzero()[:, 0])

    def _hidden(self, chosen_N: torch.Tensor) -> torch.Tensor:
        return self.head.whole(self.hidden_TRD).flatten(0, 1)[chosen_N]

    def _values(self, chosen_N: torch.Tensor) -> torch.Tensor:
        return self.head.values(self.hidden_TRD).flatten()[chosen_N]

    def _put(self, values_N: torch.Tensor, chosen_N: torch.Tensor) -> torch.Tensor:
        """Put the values of all context-parallel ranks' chosen positions at the caller's places."""
        layout = self.microbatch.layout
        shape_TR, rest = layout.sources_CTR.shape[1:], values_N.shape[1:]
        flat = values_N.new_zeros(shape_TR.numel(), *rest).index_put((chosen_N,), values_N)
        return layout.put(_gather_copies(flat.view(*shape_TR, *rest), self.context_group))


def shifted(values_BS: torch.Tensor, places: int) -> torch.Tensor:
    """At each position the value of the one so many places later in the row, 0 beyond its end."""
    return F.pad(values_BS[:, places:], (0, min(places, values_BS.size(1))))


def _gather_copies(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every context-parallel rank's values, `[C, ...]`, differentiable; all ranks must compute the
    same from the result.
    """
    if group.size() == 1:
        return values.unsqueeze(0)
    # Each rank holds the whole gradient of the same loss, so its own part is enough.
    return exchange(
        values.unsqueeze(0),
        lambda own: gather(own, group),
        lambda grad: take_part(grad, group),
    )
