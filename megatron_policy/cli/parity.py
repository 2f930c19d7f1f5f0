"""`parity`: compares the Hugging Face model with the Megatron-Core model on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli.failures import one_line_errors
from megatron_policy.cli.options import AsJson, Precision, keys_as_options
from megatron_policy.cli.report import CommandReport, show

if TYPE_CHECKING:
    from megatron_policy.parity import Deviation, Parity


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
    tokens: Annotated[int, typer.Option(min=2, help="Length of the two random sequences.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also compare the output of every decoder layer.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest difference of a logit or a logprob: 1e-4 in float32, in bfloat16 three "
            "times Hugging Face's own distance from float32.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Hugging Face directory to compare with; HF_DIR itself if not given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare logits and logprobs of Hugging Face and Megatron-Core on random tokens.

    Holds the model in memory, one side after the other; with --tp and --pp the ranks are processes
    on this machine, on its GPUs if there are any. Exits with 1 beyond the tolerance.
    """
    with one_line_errors(as_json):
        _be_quiet()
        from megatron_policy.parity import compare

        with keys_as_options():
            result = compare(
                model,
                tp=tp,
                pp=pp,
                ep=ep,
                etp=etp,
                sequence_parallel=sequence_parallel,
                dtype=dtype.value,
                tokens=tokens,
                seed=seed,
                per_layer=per_layer,
                tolerance=tolerance,
                reference=reference,
            )
        show(report_parity(result), as_json)


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
    error = None if result.holds else _complaint(result)
    return CommandReport(lambda: _as_data(result, error), _lines(result), error)


def _lines(result: Parity) -> Iterator[str]:
    job = result.job
    layout = f"tp {job.tp} x pp {job.pp}" + (", sequence parallel" * job.sequence_parallel)
    if job.ep > 1 or job.etp is not None:
        layout += f", experts ep {job.ep} x etp {job.etp or job.tp}"
    yield (
        f"{result.family}, {job.num_layers} layers, {layout}, {job.dtype}: "
        f"{job.rows} rows of {job.tokens} random tokens, seed {job.seed}"
    )
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


def _complaint(result: Parity) -> str:
    far = [
        f"{name} differ by {difference.max:.1e}, limit {limit:.1e}"
        for name, difference, limit in (
            ("logits", result.logits, result.logits_limit),
            ("logprobs", result.logprobs, result.logprobs_limit),
        )
        if not difference.max <= limit
    ]
    if result.first_layer_apart is not None:
        far.append(f"layer {result.first_layer_apart} is the first whose output differs")
    return "the models do not agree: " + "; ".join(far)
