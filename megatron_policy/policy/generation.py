"""Text generation by the policy itself, as the configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.sampling import Continuations, Sampling
from megatron_policy.training.checks import checked_prompts
from megatron_policy.training.sync_microbatches import prepared_together


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
        sampling = _sampling(self._config, self._tokenizer, greedy)
        pad_id = _pad_id(self._tokenizer)
        return _joined(
            [
                self._engine.generate(
                    prompts, lengths, sampling, pad_id, self._longest, self._generator
                )
                for prompts, lengths in self._parts(data)
            ],
            pad_id,
        )

    def _parts(self, data: BatchedDataDict) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Prompts and lengths of the rows that share a cache. Replicas that use each other's
        experts get the same number of parts, and all refuse what one of them refuses.
        """

        def cut() -> list[tuple[torch.Tensor, torch.Tensor]]:
            prompts_BS, lengths_B = checked_prompts(data, self._engine.vocab_size, self._longest)
            rows = self._config.generation_batch_size
            return list(zip(prompts_BS.split(rows), lengths_B.split(rows), strict=True))

        if not self._engine.joins_replicas:
            return cut()
        parts, most = prepared_together(cut, len, self._engine.groups.dp)
        prompts_BS, lengths_B = parts[0]
        return parts + [(prompts_BS[:0], lengths_B[:0])] * (most - len(parts))


def _joined(parts: Sequence[Continuations], pad_id: int) -> Continuations:
    """Concatenate all rows, padded to the widest part."""
    width = max(part.tokens_BT.size(1) for part in parts)
    return Continuations(
        tokens_BT=torch.cat(
            [pad(p.tokens_BT, (0, width - p.tokens_BT.size(1)), value=pad_id) for p in parts]
        ),
        lengths_B=torch.cat([p.lengths_B for p in parts]),
        generated_B=torch.cat([p.generated_B for p in parts]),
        logprobs_BT=torch.cat(
            [pad(p.logprobs_BT, (0, width - p.logprobs_BT.size(1))) for p in parts]
        ),
    )


def _sampling(config: PolicyConfig, tokenizer: Any, greedy: bool) -> Sampling:
    settings = config.generation
    if settings is None:
        raise ConfigError(
            "policy.generation is missing: generate needs at least generation.max_new_tokens"
        )
    eos = getattr(tokenizer, "eos_token_id", None)
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        filters=Filters.of(settings),
        filter_logprobs=settings.filter_logprobs,
        greedy=greedy,
        stop_ids=(*settings.stop_token_ids, *([] if eos is None else [int(eos)])),
    )


def _pad_id(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        raise ConfigError("generate needs a tokenizer with a pad_token_id; pass one as `tokenizer`")
    return int(pad)
