"""Log-probabilities, entropies and top-k logits of given sequences, in the caller's rows and order.

Shapes: B rows, S positions, K candidates, or experts that a token takes in each of L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import current_device, to_device
from megatron_policy.errors import BatchError
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import inside
from megatron_policy.training.batching import Batcher, ScoringBatches
from megatron_policy.training.checks import (
    check_batch,
    check_head,
    check_lengths,
    is_count,
)
from megatron_policy.training.replay import Replay
from megatron_policy.training.sync_microbatches import prepare_together

Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""The shape `...` and the dtype of each result `[B, S, ...]`."""
_SCORES: Kinds = [((), torch.float32)]


@dataclass(frozen=True)
class Scorer:
    """Scores with one policy's chunks, `rows` at a time if batches are padded and the caller gives
    no number. Every rank of a replica gets the whole result, on the CPU.
    """

    engine: TrainingEngine
    batcher: Batcher
    rows: int
    uses_reference: Callable[[], bool]
    """Whether the reference computes now, which has no filters and chooses its own experts."""

    def logprobs(self, data: BatchedDataDict, rows: int | None) -> torch.Tensor:
        """fp32 `[B, S]`: position t holds `log p(token t | tokens before t)`; 0 at position 0,
        beyond `input_lengths`, and where the filters drop token t.
        """
        (found,) = self._read(data, rows, self._logprobs, replay=Replay.REQUIRED)
        return found

    def logprobs_and_experts(
        self, data: BatchedDataDict, rows: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs`, and the experts `[B, S, L, K]` that tokens took; -1 beyond `input_lengths`.
        BatchError for a model without experts.
        """
        check_head(self.engine.table.architecture)
        routes = self.batcher.replay
        routes.check_has_experts()
        checked, cut = self._cut(data, rows)
        parts, experts = self.engine.forward_with_experts(cut.microbatches, self._logprobs)
        taken_BSLK = routes.empty(*checked["input_ids"].shape)
        for own, part_BSLK in zip(cut.rows, experts, strict=True):
            kept = part_BSLK[: len(own)].to(taken_BSLK)
            taken_BSLK[torch.tensor(own), : kept.size(1)] = kept
        (found,) = self._place(checked, cut, parts)
        return found, taken_BSLK

    def entropy(self, data: BatchedDataDict, rows: int | None) -> torch.Tensor:
        """fp32 `[B, S]`, in nats: position t holds the entropy of the distribution that token t is
        drawn from; 0 at position 0 and beyond `input_lengths`.
        """

        def read(output: Output) -> list[torch.Tensor]:
            wanted_BS = inside(output.microbatch.host.data)
            _, entropies = self._filter(output).next_token_scores(wanted_BS, entropy=True)
            assert entropies is not None
            return [F.pad(entropies, (1, 0))]

        (found,) = self._read(data, rows, read)
        return found

    def values(self, data: BatchedDataDict, rows: int | None) -> torch.Tensor:
        """fp32 `[B, S]`: what a scalar head makes of the tokens up to each position; 0 beyond
        `input_lengths`. ConfigError for a policy without such a head.
        """

        def read(output: Output) -> list[torch.Tensor]:
            return [output.values(inside(output.microbatch.host.data))]

        (found,) = self._read(data, rows, read, scalar=True)
        return found

    def scores(self, data: BatchedDataDict, rows: int | None) -> torch.Tensor:
        """fp32 `[B]`: `values` at the last token of each row."""
        values_BS = self.values(data, rows)
        checked = self._check(data)
        lengths = check_lengths(checked, self.batcher.scoring)
        return values_BS.gather(1, torch.tensor(lengths).unsqueeze(1) - 1).squeeze(1)

    def topk_logits(
        self, data: BatchedDataDict, k: int, rows: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits after each position and their token ids, fp32 and int64
        `[B, S, k]`, largest first, at temperature 1; 0 beyond `input_lengths`.
        """
        if not is_count(k) or k > self.engine.vocab_size:
            raise BatchError(
                f"k is {k!r}; it must be a whole number between 1 and the vocabulary size "
                f"{self.engine.vocab_size}"
            )

        def read(output: Output) -> list[torch.Tensor]:
            return list(output.topk(k, inside(output.microbatch.host.data)))

        kinds = [((k,), torch.float32), ((k,), torch.int64)]
        values, indices = self._read(data, rows, read, kinds)
        return values, indices

    def _logprobs(self, output: Output) -> list[torch.Tensor]:
        wanted_BS = inside(output.microbatch.host.data)
        scores, _ = self._filter(output).next_token_scores(wanted_BS)
        return [F.pad(scores, (1, 0))]

    def _filter(self, output: Output) -> Output:
        return output.unfiltered if self.uses_reference() else output

    def _read(
        self,
        data: BatchedDataDict,
        rows: int | None,
        read: Callable[[Output], list[torch.Tensor]],
        kinds: Kinds = _SCORES,
        *,
        scalar: bool = False,
        replay: Replay = Replay.IF_GIVEN,
    ) -> list[torch.Tensor]:
        """Apply `read` to all rows; returns `[B, S, ...]` for each of `kinds`. ConfigError unless
        the policy's head is of the kind that it reads, a `scalar` one or not.
        """
        check_head(self.engine.table.architecture, scalar)
        checked, cut = self._cut(data, rows, replay)
        return self._place(checked, cut, self.engine.forward(cut.microbatches, read), kinds)

    def _place(
        self,
        data: BatchedDataDict,
        cut: ScoringBatches,
        parts: Sequence[list[torch.Tensor]],
        kinds: Kinds = _SCORES,
    ) -> list[torch.Tensor]:
        """What the last stage has read of each microbatch, in the caller's rows, on every rank."""
        engine, where = self.engine, current_device()
        tokens_BS = data["input_ids"]
        found: list[torch.Tensor] = []
        for index, (rest, dtype) in enumerate(kinds):
            whole = torch.zeros(*tokens_BS.shape, *rest, dtype=dtype, device=where)
            for own, part in zip(cut.rows, parts, strict=bool(parts)):
                values = part[index][: len(own)]
                whole[to_device(torch.tensor(own)), : values.size(1)] = values
            shared = engine.share_tensor(whole if engine.is_last_stage else None, whole)
            found.append(shared.cpu())
        return found

    def _check(self, data: BatchedDataDict) -> BatchedDataDict:
        batcher = self.batcher
        return check_batch(data, self.engine.vocab_size, batcher.attachments, batcher.shell)

    def _cut(
        self, data: BatchedDataDict, rows: int | None, replay: Replay = Replay.IF_GIVEN
    ) -> tuple[BatchedDataDict, ScoringBatches]:
        """Check and cut the data. Replicas that use each other's experts run the same number of
        microbatches, and all refuse what one of them refuses.
        """

        def cut() -> tuple[BatchedDataDict, ScoringBatches]:
            checked = self._check(data)
            check_lengths(checked, self.batcher.scoring)
            self.batcher.longest.check(checked)
            own = Replay.NEVER if self.uses_reference() else replay
            checked = self.batcher.replay.prepare(checked, own)
            return checked, self.batcher.for_scoring(checked, rows or self.rows)

        if not self.engine.joins_replicas:
            return cut()
        (checked, own), most = prepare_together(
            cut, lambda made: len(made[1].microbatches), self.engine.groups.dp
        )
        filled = self.batcher.fill_up(own.microbatches, most, checked)
        return checked, replace(own, microbatches=filled)
