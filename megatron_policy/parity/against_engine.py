"""Compares an inference engine's log-probabilities of its own samples with the policy's, and says
what it knows of the causes of a difference.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import checked_topology
from megatron_policy.convert.headers import open_headers
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.rotary import DynamicScaling, LongScaling
from megatron_policy.converters.formats.hf_files import locate
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError
from megatron_policy.inference.vllm.process import EngineProcess
from megatron_policy.parity.ranks import make_policy_section, read_on_ranks, read_policy
from megatron_policy.parity.result import Job
from megatron_policy.refit.comparison import EngineComparison, Tolerance, compare, draw_rows

ROWS = 8
ENGINE_S = 1800.0
"""The longest time that an engine may take, its start included."""
_FAR = 10.0
"""A token differs in its own right if it is so many times as far as the others in the middle."""
_LARGE_ROUNDING = 4.0
"""A 16-bit dtype hardly makes so many times the mean that is allowed."""
TEXT = "The sum of two and two"


@dataclass(frozen=True)
class EngineParity:
    """What the policy and an engine say of the same rows."""

    job: Job
    family: str
    version: str
    """The engine's."""
    prompts: EngineComparison
    """Of whole rows, which the engine reads at once."""
    samples: EngineComparison
    """Of the tokens that it drew one after another, with what it said then."""
    causes: tuple[str, ...]
    """What a difference comes from, as far as that is known."""
    notes: tuple[str, ...]
    """What makes differences elsewhere, and none here."""

    @property
    def holds(self) -> bool:
        """Whether both are within their limits."""
        return self.prompts.agrees and self.samples.agrees


def compare_with_engine(
    model: str,
    *,
    sizes: dict[str, Any],
    dtype: str = "float32",
    tokens: int = 64,
    seed: int = 0,
    tolerance: float | None = None,
    served: str | None = None,
    python: str | None = None,
    timeout_s: float = ENGINE_S,
) -> EngineParity:
    """Let vLLM, run by the interpreter `python`, continue prompts of random tokens, and compare its
    log-probabilities with those of the policy in a layout of `sizes` (`tp`, `pp`, `ep`, `etp`,
    `sequence_parallel`). Both compute in `dtype`; the engine can read another checkpoint, `served`.
    """
    _, table = open_headers(model)
    arch = table.architecture
    if not 4 <= tokens < arch.positions:
        raise ConfigError(f"{tokens} tokens: give 4 or more, and fewer than {arch.positions}")
    limits = Tolerance.of([dtype_named(dtype)])
    if tolerance is not None:
        if not 0.0 <= tolerance < math.inf:
            raise ConfigError(f"tolerance is {tolerance}: give a finite number, 0 or more")
        limits = Tolerance(tolerance, tolerance, "as given")
    job = Job(
        model=model,
        vocab_size=arch.vocab_size,
        num_layers=arch.num_layers,
        dtype=dtype,
        rows=ROWS,
        tokens=tokens,
        seed=seed,
        per_layer=False,
        timeout_s=timeout_s,
        sequences=[],
        **sizes,
    )
    checked_topology(PolicyConfig.parse(make_policy_section(job)), arch, job.tp * job.pp)
    path = served or model
    text = TEXT if (locate(path) / "tokenizer.json").exists() else None
    prompts = draw_rows(arch.vocab_size, tokens // 2, ROWS, seed)
    asked = EngineJob(str(Path(locate(path)).absolute()), prompts, tokens, dtype, seed, text)
    read = read_engine(asked, python, timeout_s)
    return _judge(replace(job, sequences=read.rows), table.family, arch, read, limits, path)


def _judge(
    job: Job,
    family: str,
    arch: Architecture,
    read: EngineReading,
    limits: Tolerance,
    path: str,
) -> EngineParity:
    outputs = read_policy(job) if job.tp * job.pp == 1 else read_on_ranks(job)[0]
    own = outputs.logprobs.tolist()
    prompts = compare(read.rows, own, read.scored, limits)
    count = len(read.sampled[0])
    # Each continuation with the token before it, whose log-probability is not asked for.
    ends = [row[-count - 1 :] for row in read.rows]
    samples = compare(ends, [row[-count:] for row in own], read.sampled, limits)
    causes = () if prompts.agrees and samples.agrees else _find_causes(job, arch, prompts, samples)
    notes = tuple(_collect_notes(read, path))
    return EngineParity(job, family, read.version, prompts, samples, tuple(causes), notes)


def _find_causes(
    job: Job, arch: Architecture, prompts: EngineComparison, samples: EngineComparison
) -> Iterator[str]:
    if prompts.agrees:
        yield (
            "the engine says another log-probability of a token when it draws it than when it "
            "reads it: a temperature, top_p, top_k, min_p or a penalty is in the former (vLLM's "
            "logprobs_mode), or its decoding computes otherwise than its prefill"
        )
    if (row := _find_head_row(prompts)) is not None:
        yield (
            f"the head's row of token {row}: its log-probabilities are far, and those of other "
            "tokens only as far as it takes probability from them"
        )
    far = [t.position for t in prompts.all_tokens if not t.distance <= prompts.tolerance.token]
    first = min(far, default=0)
    if first > 2 and len(far) > ROWS:
        yield f"no token before position {first} is beyond the limit: a window, or a length"
    if any(isinstance(rope.scaling, DynamicScaling | LongScaling) for rope in arch.ropes):
        yield (
            "the rotary frequencies of this model depend on the length of text: here both sides "
            f"take texts of up to {job.tokens + 1} tokens (rope_length: maximum, max_model_len)"
        )
    if job.dtype != "float32" and prompts.mean <= _LARGE_ROUNDING * prompts.tolerance.mean:
        yield f"rounding of {job.dtype}, if it is gone with --dtype float32"


def _find_head_row(found: EngineComparison) -> int | None:
    """The token whose row of the head differs, if the others are much nearer."""
    distances: dict[int, list[float]] = {}
    for token in found.all_tokens:
        distances.setdefault(token.token, []).append(token.distance)
    means = {token: fmean(own) for token, own in distances.items()}
    largest = max(means, key=means.__getitem__)
    others = [token.distance for token in found.all_tokens if token.token != largest]
    alone = means[largest] > found.tolerance.mean and len(others) > len(distances[largest])
    return largest if alone and means[largest] > _FAR * median(others) else None


def _collect_notes(read: EngineReading, path: str) -> Iterator[str]:
    if read.defaults:
        given = ", ".join(f"{name} {value}" for name, value in read.defaults.items())
        yield (
            f"generation_config.json has {given}: vLLM samples with that unless a request says "
            "otherwise; here it was told not to"
        )
    if read.text_ids is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(locate(path), trust_remote_code=False)
        bare = tokenizer.encode(TEXT, add_special_tokens=False)
        added = [token for token in read.text_ids if token not in bare]
        if read.text_ids != bare:
            yield (
                f"the engine's tokenizer adds {added} to a text prompt: rows that training "
                "tokenises without it, or chat templates that have it already, are other rows. "
                "Here both sides read the same ids"
            )


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
