"""Runs both models on a checkpoint and compares them, with limits for what is close enough."""

from __future__ import annotations

import math

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import checked_topology
from megatron_policy.convert.headers import open_headers
from megatron_policy.converters.architecture import Architecture
from megatron_policy.coordination.timeouts import COLLECTIVE_TIMEOUT_S, checked_timeout
from megatron_policy.device import accelerators
from megatron_policy.errors import ConfigError
from megatron_policy.parity.ranks import (
    join_outputs,
    make_policy_section,
    read_on_ranks,
    read_policy,
)
from megatron_policy.parity.reference import read_reference
from megatron_policy.parity.result import (
    Deviation,
    Job,
    ModelOutputs,
    Parity,
    count_media,
    count_room,
)

ROWS = 2
"""Sequences: more than one, so that rows cannot be mistaken for positions."""
TOKENS = 64
"""Of a row, beside those of its picture and clip."""
MOST = 4096
"""Tokens of a row with them, unless more are asked for."""

LIMITS = {"float32": 1e-4}
"""Largest difference of a logit and of a logprob. Two summation orders of the same fp32 sums differ
by about 1e-6 of the logits' size, ten times that for deep models; a wrong weight, scale,
rotation or mask shows at 1e-2 and above. 1e-4 lies between the two.
"""

BF16_NOISE = 3.0
"""bf16 has no limit that fits all models: its rounding grows with depth and with the activations.
The yardstick is Hugging Face itself, its bf16 pass against its fp32 pass on the same tokens; our
bf16 pass can be this many times as far from its bf16 pass, since each is about that far from the
exact result, in its own direction.
"""


def compare(
    model: str,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    sequence_parallel: bool = False,
    dtype: str = "float32",
    tokens: int | None = None,
    seed: int = 0,
    per_layer: bool = False,
    tolerance: float | None = None,
    reference: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Parity:
    """Differences between transformers and the Megatron-Core model over two rows of random tokens,
    without `tokens` of 64 and as many more as their pictures and clips take.

    One rank runs in this process, several in separate processes on this machine: `tp * pp`, over
    which the experts of each stage split by `ep` times `etp` (`tp` if None). `tolerance`
    replaces the limits of `dtype`; the Hugging Face side can read another checkpoint, `reference`.
    ConfigError, ConversionError or WorkerError when either side cannot be run.
    """
    checked_timeout(timeout_s)
    if tolerance is not None and not 0.0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance is {tolerance}: give a finite number, 0 or more")
    _, table = open_headers(model)
    arch = table.architecture
    tokens = _choose_length(arch) if tokens is None else tokens
    _check(arch, tokens, tp * pp)
    job = Job(
        model=model,
        vocab_size=arch.vocab_size,
        num_layers=arch.num_layers,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        rows=ROWS,
        tokens=tokens,
        seed=seed,
        per_layer=per_layer,
        timeout_s=timeout_s,
    )
    checked_topology(PolicyConfig.parse(make_policy_section(job)), arch, tp * pp)
    theirs = read_reference(reference or model, job, dtype, per_layer)
    limits = _limits(job, reference or model, theirs, tolerance)
    ours = read_policy(job) if tp * pp == 1 else join_outputs(job, read_on_ranks(job))
    _check_vocabulary(ours, theirs)
    return Parity(
        job,
        table.family,
        *_measure(ours, theirs),
        *limits,
        count_media(job, arch.shell),
        count_room(arch.shell, ROWS),
    )


def _measure(
    ours: ModelOutputs, theirs: ModelOutputs
) -> tuple[Deviation, Deviation, dict[int, Deviation]]:
    """How far apart the logits, the logprobs and the layers' outputs are."""
    return (
        Deviation.between(ours.logits, theirs.logits),
        Deviation.between(ours.logprobs, theirs.logprobs),
        {n: Deviation.between(ours.layers[n], theirs.layers[n]) for n in sorted(ours.layers)},
    )


def _choose_length(arch: Architecture) -> int:
    """Tokens of rows in which text and all that the model sees and hears have room."""
    return min(TOKENS + count_room(arch.shell, ROWS), MOST, arch.positions)


def _check(arch: Architecture, tokens: int, world: int) -> None:
    most = arch.positions
    if not 2 <= tokens <= most:
        raise ConfigError(f"{tokens} tokens: the model takes up to {most}, and a logprob needs 2")
    if 0 < accelerators() < world:
        raise ConfigError(
            f"{world} ranks need {world} GPUs, but {accelerators()} can be seen; "
            "with an empty CUDA_VISIBLE_DEVICES they run on the CPU"
        )


def _limits(
    job: Job, model: str, theirs: ModelOutputs, tolerance: float | None
) -> tuple[float, float]:
    """Limits of logits and of logprobs: as given, from the table, or from the reference's own
    rounding.
    """
    limit = LIMITS.get(job.dtype) if tolerance is None else tolerance
    if limit is not None:
        return limit, limit
    exact = read_reference(model, job, "float32", per_layer=False)
    return (
        BF16_NOISE * Deviation.between(theirs.logits, exact.logits).max,
        BF16_NOISE * Deviation.between(theirs.logprobs, exact.logprobs).max,
    )


def _check_vocabulary(ours: ModelOutputs, theirs: ModelOutputs) -> None:
    if ours.logits.shape != theirs.logits.shape:
        raise ConfigError(
            f"the models have vocabularies of {ours.logits.size(-1)} and "
            f"{theirs.logits.size(-1)}: they cannot be compared"
        )
