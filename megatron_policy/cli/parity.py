"""`parity`: compares the Hugging Face model with the Megatron-Core model on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli.options import AsJson, Precision, keys_as_options
from megatron_policy.cli.report import CommandReport, one_line_errors, show

if TYPE_CHECKING:
    from megatron_policy.parity import Deviation, Parity
    from megatron_policy.parity.against_engine import EngineParity
    from megatron_policy.refit.comparison import EngineComparison


class EngineName(StrEnum):
    """Inference engines that a policy can be compared with."""

    vllm = "vllm"


Tokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Length of the random sequences; if not given 64, and without --engine also what "
        "pictures and clips take.",
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="Hugging Face directory to compare with, or for the engine to serve; HF_DIR itself if "
        "not given."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Largest difference of a logit or a logprob: 1e-4 in float32, in bfloat16 three "
        "times Hugging Face's own distance from float32. With --engine, of a logprob: 2e-4 in "
        "float32 and 1e-5 on average, in bfloat16 1 and 0.05.",
    ),
]


def parity(
    model: Annotated[str, typer.Argument(metavar="HF_DIR", help="A Hugging Face directory.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks of a stage.")] = 1,
    etp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel ranks of experts; as many as --tp if not given."),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Also split positions over the tp ranks.")
    ] = False,
    dtype: Annotated[
        Precision, typer.Option(help="Dtype that both models compute in.")
    ] = Precision.float32,
    tokens: Tokens = None,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also compare the output of every decoder layer.")
    ] = False,
    tolerance: Tolerance = None,
    reference: Reference = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="Compare with this inference engine's logprobs of its own samples."),
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="The interpreter of the environment that has the engine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare logits and logprobs of Hugging Face and Megatron-Core on random tokens.

    Holds the model in memory, one side after the other; with --tp and --pp the ranks are processes
    on this machine, on its GPUs if there are any. With --engine, compares with an inference
    engine's logprobs of what it samples itself. Exits with 1 beyond the tolerance.
    """
    sizes = dict[str, Any](tp=tp, pp=pp, ep=ep, etp=etp, sequence_parallel=sequence_parallel)
    common = dict[str, Any](dtype=dtype.value, seed=seed, tolerance=tolerance)
    if tokens is not None:
        common["tokens"] = tokens
    with one_line_errors(as_json), keys_as_options():
        from megatron_policy.errors import ConfigError

        if engine is None and engine_python is not None:
            raise ConfigError("--engine-python is for --engine vllm: give both or neither")
        if engine is not None and per_layer:
            raise ConfigError("--per-layer is without --engine: an engine shows no layer's output")
        _be_quiet()
        if engine is None:
            from megatron_policy.parity import compare

            far = compare(model, per_layer=per_layer, reference=reference, **sizes, **common)
            report = report_parity(far)
        else:
            from megatron_policy.parity.against_engine import compare_with_engine

            served: dict[str, Any] = {"served": reference, "python": engine_python}
            report = report_engine(compare_with_engine(model, sizes=sizes, **served, **common))
    show(report, as_json)


def _be_quiet() -> None:
    """Keep loading progress and torch's warnings off the terminal."""
    import logging

    import torch  # noqa: F401 - it sets its loggers' levels when it is imported
    from transformers.utils import logging as transformers_logging

    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def report_parity(result: Parity) -> CommandReport:
    """Report how far apart the models are, and as an error what is beyond its limit."""
    far = [
        f"{name} differ by {difference.max:.1e}, limit {limit:.1e}"
        for name, difference, limit in (
            ("logits", result.logits, result.logits_limit),
            ("logprobs", result.logprobs, result.logprobs_limit),
        )
        if not difference.max <= limit
    ]
    error = None
    if far:
        if result.first_layer_apart is not None:
            far.append(f"layer {result.first_layer_apart} is the first whose output differs")
        error = "the models do not agree: " + "; ".join(far)
    return CommandReport(lambda: _as_data(result, error), _lines(result), error)


def _lines(result: Parity) -> Iterator[str]:
    job = result.job
    layout = f"tp {job.tp} x pp {job.pp}" + (", sequence parallel" * job.sequence_parallel)
    if job.ep > 1 or job.etp is not None:
        layout += f", experts ep {job.ep} x etp {job.etp or job.tp}"
    counts = "".join(f", {name} in {count} of them" for name, count in result.media.items())
    yield (
        f"{result.family}, {job.num_layers} layers, {layout}, {job.dtype}: "
        f"{job.rows} rows of {job.tokens} random tokens{counts}, seed {job.seed}"
    )
    yield from (f"WARNING: {warning}" for warning in result.warnings)
    yield f"{'':<12}{'max':>10}{'mean':>10}{'relative':>10}{'limit':>10}"
    yield _row("logits", result.logits, result.logits_limit)
    yield _row("logprobs", result.logprobs, result.logprobs_limit)
    for number, difference in result.layers.items():
        yield _row(f"layer {number}", difference)


def _as_data(result: Parity, error: str | None) -> dict[str, Any]:
    job = result.job
    etp = job.tp if job.etp is None else job.etp
    return {
        "family": result.family,
        "num_layers": job.num_layers,
        "layout": {"tp": job.tp, "pp": job.pp, "ep": job.ep, "etp": etp},
        "sequence_parallel": job.sequence_parallel,
        "dtype": job.dtype,
        "rows": job.rows,
        "tokens": job.tokens,
        "seed": job.seed,
        "media": result.media,
        "warnings": list(result.warnings),
        "holds": result.holds,
        "logits": _numbers(result.logits) | {"limit": result.logits_limit},
        "logprobs": _numbers(result.logprobs) | {"limit": result.logprobs_limit},
        "layers": {number: _numbers(found) for number, found in result.layers.items()},
        "first_layer_apart": result.first_layer_apart,
        "error": error,
    }


def _numbers(difference: Deviation) -> dict[str, float]:
    return {name: getattr(difference, name) for name in ("max", "mean", "relative")}


def _row(name: str, difference: Deviation, limit: float | None = None) -> str:
    numbers = [*_numbers(difference).values(), *([] if limit is None else [limit])]
    cells = [f"{number:10.1e}" for number in numbers]
    beyond = limit is not None and not difference.max <= limit
    return f"{name:<12}{''.join(cells)}" + ("  beyond" if beyond else "")


def report_engine(result: EngineParity) -> CommandReport:
    """Report how far the policy is from an engine, and as an error what is beyond its limit."""
    sides = {"prompts": result.prompts, "samples": result.samples}
    far = [f"{name}: {found}" for name, found in sides.items() if not found.agrees]
    error = None
    if far:
        causes = result.causes or ("none is known: compare the files by verify, then the configs",)
        error = "the engine does not agree: " + "; ".join([*far, *(f"cause: {c}" for c in causes)])
    return CommandReport(lambda: _engine_data(result, error), _engine_lines(result), error)


def _engine_lines(result: EngineParity) -> Iterator[str]:
    job = result.job
    yield (
        f"{result.family}, {job.num_layers} layers, tp {job.tp} x pp {job.pp}, {job.dtype}: "
        f"{job.rows} rows of {job.tokens} tokens, the second half sampled by vLLM "
        f"{result.version}, seed {job.seed}"
    )
    yield f"{'logprobs of':<18}{'tokens':>8}{'mean':>10}{'limit':>10}{'max':>10}{'limit':>10}"
    for name, found in (("whole rows", result.prompts), ("its own samples", result.samples)):
        limits = found.tolerance
        numbers = (found.mean, limits.mean, found.largest, limits.token)
        cells = "".join(f"{number:10.1e}" for number in numbers)
        yield f"{name:<18}{found.tokens:>8}{cells}" + ("" if found.agrees else "  beyond")
    yield "the tokens that are furthest apart:"
    for token in result.prompts.worst:
        yield f"  {token.distance:.1e}: {token}"
    yield from (f"cause: {cause}" for cause in result.causes)
    yield from (f"note: {note}" for note in result.notes)


def _engine_data(result: EngineParity, error: str | None) -> dict[str, Any]:
    job = result.job
    etp = job.tp if job.etp is None else job.etp
    return {
        "engine": "vllm",
        "version": result.version,
        "family": result.family,
        "layout": {"tp": job.tp, "pp": job.pp, "ep": job.ep, "etp": etp},
        "dtype": job.dtype,
        "rows": job.rows,
        "tokens": job.tokens,
        "seed": job.seed,
        "holds": result.holds,
        "prompts": _compared(result.prompts),
        "samples": _compared(result.samples),
        "causes": list(result.causes),
        "notes": list(result.notes),
        "error": error,
    }


def _compared(found: EngineComparison) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "mean": found.mean,
        "mean_limit": found.tolerance.mean,
        "max": found.largest,
        "limit": found.tolerance.token,
        "worst": [token._asdict() | {"distance": token.distance} for token in found.worst],
    }
