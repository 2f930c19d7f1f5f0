"""Continues prompts as a configuration says; knows no other verb of the policy."""

from __future__ import annotations

from typing import Any

import torch

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.train.generate import Continuations, generate
from megatron_policy.train.pipeline import Pipeline
from megatron_policy.train.sampling import Sampling


class Continuing:
    """One replica's sampling: its settings and its random numbers."""

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: Any,
        pipeline: Pipeline,
        replica: int,
        longest: int,
    ) -> None:
        """No text grows beyond `longest` tokens."""
        self._config, self._tokenizer, self._pipeline = config, tokenizer, pipeline
        self._longest = longest
        # Replicas must not draw the same tokens; the ranks of one replica draw once and share.
        self._generator = torch.Generator(device=device.current_device())
        self._generator.manual_seed(config.seed + replica)

    @property
    def generator(self) -> torch.Generator:
        """Where the random numbers come from: who restores a policy sets its state."""
        return self._generator

    def __call__(self, data: BatchedDataDict, greedy: bool) -> Continuations:
        """Continue right-padded prompts; ConfigError where settings or tokenizer are missing."""
        return generate(
            self._pipeline,
            data,
            _sampling(self._config, self._tokenizer, greedy),
            _pad_id(self._tokenizer),
            self._longest,
            self._generator,
            self._config.generation_batch_size,
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
        top_k=settings.top_k,
        top_p=settings.top_p,
        greedy=greedy,
        stop_ids=(*settings.stop_token_ids, *([] if eos is None else [int(eos)])),
    )


def _pad_id(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        raise ConfigError("generate needs a tokenizer with a pad_token_id; pass one as `tokenizer`")
    return int(pad)
