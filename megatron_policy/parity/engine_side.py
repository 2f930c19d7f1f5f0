"""The side of an inference engine, which samples and says its log-probabilities."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_policy.errors import ConfigError
from megatron_policy.inference.vllm.process import EngineProcess


@dataclass(frozen=True)
class EngineJob:
    """What an engine samples."""

    model: str
    prompts: list[list[int]]
    tokens: int
    """The length of each row: a prompt and its continuation."""
    dtype: str
    seed: int
    text: str | None = None
    """For the engine's tokenizer; None if it has none."""


@dataclass(frozen=True)
class EngineReading:
    """What an engine has sampled, and says of it; see `EngineProcess.describe`."""

    rows: list[list[int]]
    """The prompts with their continuations."""
    sampled: list[list[float]]
    """Log-probabilities of the continuations, as the engine drew them."""
    scored: list[list[float]]
    """Those of all tokens but each row's first, read as prompts."""
    version: str
    defaults: dict[str, Any] = field(default_factory=dict)
    text_ids: list[int] | None = None


def read_engine(job: EngineJob, python: str | None, timeout_s: float) -> EngineReading:
    """Let vLLM continue the prompts at temperature 1 and without filters, then score the whole
    rows, in a process of the interpreter `python`, by default that of this process. ConfigError,
    with vLLM's own words, if it does not take the model.
    """
    if python is None and find_spec("vllm") is None:
        raise ConfigError(
            "vllm is not installed in this environment: name the interpreter of the one that has "
            "it by --engine-python"
        )
    interpreter = sys.executable if python is None else python
    if not os.access(interpreter, os.X_OK):
        raise ConfigError(f"{interpreter} is no interpreter that this user can run")
    count = job.tokens - len(job.prompts[0])
    options = {
        "dtype": job.dtype,
        "seed": job.seed,
        "max_model_len": job.tokens + 1,  # vLLM scores a prompt when it continues it
        "max_num_seqs": len(job.prompts),
        "skip_tokenizer_init": job.text is None,
        "enforce_eager": True,
        "disable_log_stats": True,
        "trust_remote_code": False,
    }
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": job.seed}
    whole = {"max_tokens": count, "min_tokens": count, "ignore_eos": True}
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        log = Path(folder) / "engine.log"
        with EngineProcess(job.model, interpreter, log, timeout_s, **options) as engine:
            drawn = engine.sample(job.prompts, **neutral, **whole)
            rows = [prompt + tokens for prompt, (tokens, _) in zip(job.prompts, drawn, strict=True)]
            sampled = [logprobs for _, logprobs in drawn]
            scored = engine.call("logprobs", rows=rows)
            return EngineReading(rows, sampled, scored, **engine.describe(job.text))
