"""`inspect`: the family's table bound to a checkpoint, weight by weight and field by field; and
`inspect-config`: whether a configuration fits its model and ranks, and who holds what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_policy.cli.options import AsJson, Config, Overrides, PolicyFile
from megatron_policy.cli.output import CONFIG_ONLY
from megatron_policy.cli.report import CommandReport, one_line, one_line_errors, show

if TYPE_CHECKING:
    from megatron_policy.converters.inspection import Inspection, Weight


def inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint of either format, or its config.json."),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Show every layer and expert separately.")
    ] = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Show how each weight and config field of a checkpoint, or of adapters, is understood.

    Reads the config and the headers of files, no weights. From a config.json alone, it shows the
    tensors that the model has. Exits with 1 if anything is left over on either side.
    """
    with one_line_errors(as_json):
        inspection = _inspect(source, config)
    error = "; also: ".join(map(one_line, inspection.problems)) or None
    lines = _lines(inspection, every)
    show(CommandReport(lambda: asdict(inspection) | {"error": error}, lines, error), as_json)


def inspect_config(
    path: PolicyFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; the fewest possible if not given.")
    ] = None,
    ignored: Annotated[
        bool, typer.Option("--ignored", help="List the keys without effect, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration against its model, and show which rank holds what and what fits.

    CONFIG can be a whole file of NeMo RL: `defaults` and interpolations need OmegaConf.
    """
    with one_line_errors(as_json):
        from megatron_policy.cli.config_report import check_config, report_config

        checked = check_config(path, overrides or (), world_size)
        show(report_config(checked, ignored), as_json)


def _inspect(source: str, config: str | None) -> Inspection:
    from dataclasses import replace

    from megatron_policy.adapters.peft_config import classify_fields
    from megatron_policy.adapters.peft_files import ADAPTER_CONFIG
    from megatron_policy.convert.headers import read_adapter_headers, read_headers
    from megatron_policy.converters.inspection import inspect, inspect_adapters

    if (found := read_adapter_headers(source, config)) is not None:
        uses = classify_fields(found.fields)
        of = inspect_adapters(found.table, uses, found.shapes, found.dtypes, ADAPTER_CONFIG)
        return replace(of, problems=tuple(dict.fromkeys((*found.problems, *of.problems))))
    seen = read_headers(source, config)
    inspection = inspect(seen.config, seen.written, seen.shapes, seen.dtypes)
    problems = (*seen.problems, *inspection.problems)
    return replace(inspection, problems=problems, config_only=seen.config_only)


def _lines(inspection: Inspection, every: bool) -> Iterator[str]:
    from megatron_policy.converters.config_fields import shown
    from megatron_policy.converters.inspection import folded

    weights = inspection.weights if every else folded(inspection.weights)
    yield f"family {inspection.family}"
    if inspection.config_only:
        yield CONFIG_ONLY
    yield ""
    yield "weights: the Megatron-Core parameter, and the Hugging Face tensors it is made of"
    for weight in weights:
        yield from _weight(weight, every)
    for title, loose in (
        ("ignored tensors", inspection.ignored),
        ("unmatched tensors", inspection.unmatched),
    ):
        if loose:
            yield from ("", title)
            yield from (f"  {t.name}  {list(t.shape)}  {t.dtype}: {t.why}" for t in loose)
    yield from ("", inspection.fields_of)
    for use in inspection.fields:
        why = f": {use.why}" if use.why else ""
        yield f"  {use.outcome:<10}  {use.name} = {shown(use.value)}{why}"
    yield ""
    wrong = sum(any(weight.wrong) for weight in inspection.weights)
    fields = Counter(use.outcome for use in inspection.fields)
    yield (
        f"{len(inspection.weights)} parameters, {wrong} without their tensors; "
        f"{len(inspection.ignored)} tensors ignored, {len(inspection.unmatched)} unmatched; "
        f"fields: {', '.join(f'{count} {outcome}' for outcome, count in fields.items())}"
    )


def _weight(weight: Weight, every: bool) -> Iterator[str]:
    from megatron_policy.parallel.topology import ranges

    padding = f" + {weight.padding} rows of padding" if weight.padding else ""
    where = ""
    if weight.layers and not every:
        where = f"  layers {ranges(weight.layers)}"
    if weight.experts and not every:
        where += f", experts {ranges(weight.experts)}"
    name, shape = _name(weight.megatron, weight, every), list(weight.shape)
    yield f"  {name}  {shape}{padding}  {weight.row}, {weight.split}{where}"
    for part, size, found, wrong in zip(
        weight.hf, weight.hf_shapes, weight.found, weight.wrong, strict=True
    ):
        mark = f"  << {wrong}" if wrong else ""
        yield f"      {_name(part, weight, every)}  {list(size)}  {found}".rstrip() + mark


def _name(template: str, weight: Weight, every: bool) -> str:
    if not every:
        return template
    for mark, numbers in (("{layer}", weight.layers), ("{expert}", weight.experts)):
        template = template.replace(mark, ",".join(map(str, numbers)))
    return template
