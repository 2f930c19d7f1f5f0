"""Text generation by the policy itself, as the configuration says, token by token.

For checks and small experiments; use an inference engine for rollouts at scale. All rows advance by
one position at a time from the end of the shortest prompt; tokens of longer prompts are fed
unchanged.

Shapes: B rows, S positions of prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import NewCache, TrainingEngine
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.sampling import (
    Continuations,
    Progress,
    Sampling,
    nothing_generated,
    sample,
)
from megatron_policy.packing.microbatch import find_blocks
from megatron_policy.training.checks import check_prompts
from megatron_policy.training.sync_microbatches import prepare_together


class TextGenerator:
    """One replica's text generation: its settings and its random numbers."""

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: Any,
        engine: TrainingEngine,
        replica: int,
        longest: int,
    ) -> None:
        """No text grows beyond `longest` tokens."""
        self._config, self._tokenizer, self._engine = config, tokenizer, engine
        self._longest = longest
        # Replicas must not draw the same tokens; the ranks of one replica draw once and share.
        self._generator = torch.Generator(device=device.current_device())
        self._generator.manual_seed(config.seed + replica)

    @property
    def generator(self) -> torch.Generator:
        """The source of the random numbers; restoring a policy sets its state."""
        return self._generator

    def __call__(self, data: BatchedDataDict, greedy: bool) -> Continuations:
        """Continue right-padded prompts; ConfigError if settings or tokenizer are missing.
        `generation_batch_size` rows at a time share a KV cache.
        """
        settings = self._config.generation
        if settings is None:
            raise ConfigError(
                "policy.generation is missing: generate needs at least generation.max_new_tokens"
            )
        eos = getattr(self._tokenizer, "eos_token_id", None)
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            filters=Filters.of(settings),
            filter_logprobs=settings.filter_logprobs,
            greedy=greedy,
            stop_ids=(*settings.stop_token_ids, *([] if eos is None else [int(eos)])),
        )
        pad_id = getattr(self._tokenizer, "pad_token_id", None)
        if pad_id is None:
            raise ConfigError(
                "generate needs a tokenizer with a pad_token_id; pass one as `tokenizer`"
            )
        pad_id, parts = int(pad_id), self._cut(data)
        with torch.no_grad(), self._engine.inference() as new_cache:
            found = [self._continue(new_cache, part, sampling, pad_id) for part in parts]
        width = max(part.tokens_BT.size(1) for part in found)
        return Continuations(
            tokens_BT=torch.cat(
                [pad(p.tokens_BT, (0, width - p.tokens_BT.size(1)), value=pad_id) for p in found]
            ),
            lengths_B=torch.cat([p.lengths_B for p in found]),
            generated_B=torch.cat([p.generated_B for p in found]),
            logprobs_BT=torch.cat(
                [pad(p.logprobs_BT, (0, width - p.logprobs_BT.size(1))) for p in found]
            ),
        )

    def _continue(
        self,
        new_cache: NewCache,
        prompts: BatchedDataDict,
        sampling: Sampling,
        pad_id: int,
    ) -> Continuations:
        """Continue rows that share a cache. A replica without any runs forward passes of one token,
        which nobody reads, while others need its experts or its part of the weights.
        """
        tokens_BS, lengths_B = (
            prompts[key].to(device.current_device()) for key in ("input_ids", "input_lengths")
        )
        if not lengths_B.numel():
            self._accompany(new_cache)
            return nothing_generated(tokens_BS)
        total = min(int(lengths_B.max()) + sampling.max_new_tokens, self._longest)
        progress = Progress.start(tokens_BS, lengths_B, total, pad_id)
        limit_B = (lengths_B + sampling.max_new_tokens).clamp(max=total)
        model = new_cache(prompts, total)
        while progress.unfinished(limit_B):
            self._any_unfinished(True)
            logits_BV = model.logits_after(progress.tokens_BT, progress.position)
            tokens_B, logprobs_B = self._draw(logits_BV, len(lengths_B), sampling)
            progress.append(tokens_B, logprobs_B, limit_B, sampling.stop_ids)
        self._accompany(new_cache)
        return progress.result(lengths_B)

    def _accompany(self, new_cache: NewCache) -> None:
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=device.current_device())
        text = BatchedDataDict(input_ids=token_11, input_lengths=token_11[0] + 1)
        while self._any_unfinished(False):
            new_cache(text, 1).logits_after(token_11, 1)

    def _any_unfinished(self, own: bool) -> bool:
        """Whether any of the replicas that compute together is unfinished; collective then."""
        if not self._engine.joins_replicas:
            return own
        found = torch.tensor(int(own), device=device.current_device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._engine.groups.dp)
        return bool(found)

    def _draw(
        self, logits_BV: torch.Tensor | None, rows: int, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw on one rank, whose random numbers alone matter; its whole replica gets the tokens
        and log-probabilities, both `[B]`.
        """
        # fp64 holds every token id exactly, so one message carries both.
        drawn_2B = torch.zeros(2, rows, dtype=torch.float64, device=device.current_device())
        tp, cp = self._engine.groups.tp, self._engine.groups.cp
        if logits_BV is not None:
            if tp.rank() == cp.rank() == 0:
                tokens_B, logprobs_B = sample(logits_BV, sampling, self._generator)
                drawn_2B = torch.stack([tokens_B.double(), logprobs_B.double()])
            if cp.size() > 1 and tp.rank() == 0:
                dist.broadcast(drawn_2B, group=cp, group_src=0)
            if tp.size() > 1:
                dist.broadcast(drawn_2B, group=tp, group_src=0)
        drawn_2B = self._engine.share_tensor(None if logits_BV is None else drawn_2B, drawn_2B)
        return drawn_2B[0].long(), drawn_2B[1].float()

    def _cut(self, data: BatchedDataDict) -> list[BatchedDataDict]:
        """The prompts that share a cache. Replicas that use each other's experts get the same
        number of parts, and all refuse what one of them refuses.
        """

        def cut() -> list[BatchedDataDict]:
            size, model = self._engine.vocab_size, self._engine.table.architecture
            prompts = check_prompts(data, size, self._longest, model.attachments, model.shell)
            blocks_B = find_blocks(model.shell, prompts) or [()] * prompts.size
            ends = [max((block.stop for block in blocks), default=0) for blocks in blocks_B]
            lengths, most = prompts["input_lengths"].tolist(), self._config.generation_batch_size
            return [prompts.slice(*rows) for rows in _cut_rows(lengths, ends, most)]

        if not self._engine.joins_replicas:
            return cut()
        parts, most = prepare_together(cut, len, self._engine.groups.dp)
        return parts + [parts[0].slice(0, 0)] * (most - len(parts))


def _cut_rows(lengths: Sequence[int], ends: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """The first row, and that behind the last one, of rows that share a cache: at most `most`. What
    enters at once is as long as the shortest of their prompts, and has to reach the `ends` of all:
    tokens before them see later ones.
    """
    first = 0
    for row in range(1, len(lengths) + 1):
        tried = slice(first, row + 1)
        full = row - first == most or row == len(lengths)
        if full or max(ends[tried]) > min(lengths[tried]):
            yield first, row
            first = row
