"""`convert`: a Hugging Face directory to a Megatron-Core checkpoint, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli.options import (
    MAX_MEMORY,
    AsJson,
    Config,
    Dtype,
    MaxMemory,
    arguments_as_options,
    parse_size,
)
from megatron_policy.cli.output import say, transfer
from megatron_policy.cli.report import (
    FAILED,
    MISUNDERSTOOD,
    CommandReport,
    one_line,
    one_line_errors,
    show,
)
from megatron_policy.estimate.sizes import show_size

if TYPE_CHECKING:
    from megatron_policy.convert import ConversionPlan, Report


class Format(StrEnum):
    """Megatron-Core's torch_dist checkpoint, or Hugging Face safetensors."""

    mcore = "mcore"
    hf = "hf"


Base = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The model that adapters were trained on; by default the directory they name.",
    ),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Add adapters to their base: DST is a whole model.")
]


def _parse_field(text: str) -> tuple[str, Any]:
    """NAME=VALUE, whose value is YAML."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text} is not NAME=VALUE, as in rope_theta=1.0e6")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{text}: its value is not valid YAML") from error


ConfigFields = Annotated[
    list[Any],
    typer.Option(
        "--hf-config-overrides",
        parser=_parse_field,
        metavar="NAME=VALUE",
        help="Another value for a field of config.json in DST; null leaves it out. Repeatable.",
    ),
]


Tensors = Annotated[
    bool, typer.Option("--tensors", help="With --dry-run: print a line for every file and tensor.")
]


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to read.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    to: Annotated[Format, typer.Option(help="The format of DST.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast the weights to this; without it they keep their own.")
    ] = None,
    max_memory: MaxMemory = MAX_MEMORY,  # type: ignore[assignment]
    max_shard_size: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Limit for the size of a file of DST, such as 5GB.",
        ),
    ] = "5GB",  # type: ignore[assignment]
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, show what would be written, and stop."),
    ] = False,
    tensors: Tensors = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST if it is a checkpoint.")
    ] = False,
    config: Config = None,
    base: Base = None,
    merge: Merge = False,
    hf_config_overrides: ConfigFields = (),  # type: ignore[assignment]
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint, block by block; needs no GPU and holds no model in memory.

    SRC can have adapters alone: a directory of PEFT, or a training checkpoint. DST appears when it
    is complete. An interrupted run can simply be repeated.
    """
    first, second = (os.path.realpath(os.path.expanduser(path)) for path in (source, destination))
    if first == second:
        raise typer.BadParameter(f"SRC and DST are both {destination}; DST must be another path")
    if tensors and not dry_run:
        raise typer.BadParameter("--tensors lists what --dry-run would write: add it")
    with one_line_errors(as_json), arguments_as_options():
        from megatron_policy.convert import convert, plan_conversion

        settings: dict[str, Any] = {
            "to": to.value,
            "dtype": None if dtype is None else dtype.value,
            "max_memory": max_memory,
            "max_shard_size": max_shard_size,
            "config": config,
            "base": base,
            "merge": merge,
            "hf_config_overrides": dict(hf_config_overrides),
        }
        if dry_run:
            planned = plan_conversion(source, destination, **settings)
            return _show_plan(planned, overwrite, tensors, as_json)
        with transfer("converted") as tell:
            done = convert(source, destination, overwrite=overwrite, progress=tell, **settings)
        end = {"dry_run": False, "digest": done.digest}
        show(CommandReport(lambda: _as_data(done.plan) | end, _lines(done)), as_json)


def _show_plan(plan: ConversionPlan, overwrite: bool, tensors: bool, as_json: bool) -> None:
    """Print the plan; first, and with the exit code, what a conversion would fail with."""
    from megatron_policy.convert.convert import check_destination
    from megatron_policy.dtypes import name_dtype
    from megatron_policy.errors import ConfigError, ExportError

    end: dict[str, Any] = {"dry_run": True, "error": None}
    code = 0
    try:
        with arguments_as_options():
            check_destination(plan, overwrite)
    except (ConfigError, ExportError) as error:
        end["error"] = one_line(str(error))
        code = MISUNDERSTOOD if isinstance(error, ConfigError) else FAILED
        say(f"error: {end['error']}", err=True)
    if tensors:
        end["written"] = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": name_dtype(tensor.dtype),
                "source_dtype": name_dtype(tensor.source_dtype),
                "bytes": tensor.nbytes,
                "keys": list(tensor.keys),
            }
            for tensor in plan.tensors
        ]
    show(CommandReport(lambda: _as_data(plan) | end, plan.describe(tensors)), as_json)
    if code:
        raise typer.Exit(code)


def _lines(report: Report) -> Iterator[str]:
    plan = report.plan
    compared = "was compared with its" if report.had_digests else "has no"
    yield (
        f"{plan.destination}: {plan.family}, {len(plan.tensors)} tensors, "
        f"{show_size(plan.bytes_written)} in {len(plan.files)} file{'s' * (len(plan.files) != 1)}"
    )
    yield f"digest of its tensors {report.digest}; the source {compared} digests"
    if plan.adapters:
        yield plan.adapters
    if plan.resumed_with:
        yield f"resume with fresh_optimizer=True and megatron_cfg.peft: {plan.resumed_with}"
    if plan.dequantised:
        yield f"dequantised {plan.dequantised}; config.json is without its quantization_config"
    if plan.dropped and plan.resumed_with:
        yield f"{len(plan.dropped)} tensors are kept once: modules of fused layers share an A"
    elif plan.dropped:
        yield f"skipped (no parameter uses them): {', '.join(plan.dropped)}"


def _as_data(plan: ConversionPlan) -> dict[str, Any]:
    return {
        "source": plan.source,
        "destination": plan.destination,
        "to": plan.to,
        "family": plan.family,
        "tensors": len(plan.tensors),
        "cast": sum(each.dtype != each.source_dtype for each in plan.tensors),
        "bytes": plan.bytes_written,
        "kinds": [
            {"name": k.name, "tensors": k.tensors, "bytes": k.nbytes, "dtypes": list(k.dtypes)}
            for k in plan.kinds
        ],
        "files": dict(plan.files),
        "side_files": plan.side_files,
        "skipped": plan.dropped,
        "source_has_digests": plan.has_digests,
        "adapters": plan.adapters or None,
        "resume_with": plan.resumed_with or None,
        "dequantised": plan.dequantised or None,
    }
