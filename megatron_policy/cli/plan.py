"""`plan --refit`: what handing a checkpoint's weights to an inference engine would move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli.failures import one_line_errors
from megatron_policy.cli.options import Dtype, Precision, in_options
from megatron_policy.cli.output import say
from megatron_policy.cli.sizes import parse_size

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig
    from megatron_policy.conversion.headers import Headers
    from megatron_policy.converters.table import Table
    from megatron_policy.refit.plan import RefitPlan
    from megatron_policy.topology import LayerSplit, Topology


@dataclass(frozen=True)
class Planned:
    """A refit of a model that is trained under a layout."""

    table: Table
    topology: Topology
    split: LayerSplit
    plan: RefitPlan


def plan(
    refit: Annotated[
        str, typer.Option("--refit", metavar="CHECKPOINT", help="Of the model that is trained.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    vpp: Annotated[int, typer.Option(min=1, help="Model chunks of a pipeline stage.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel replicas.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    bucket_size: Annotated[
        int,
        typer.Option(parser=parse_size, metavar="SIZE", help="Most bytes that a collective moves."),
    ] = "512MiB",  # type: ignore[assignment]
    dtype: Annotated[
        Dtype | None, typer.Option(help="Hand the weights over in this, not as in CHECKPOINT.")
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="What the model is trained in.")
    ] = Precision.bfloat16,
    tensors: Annotated[bool, typer.Option("--tensors", help="A line for every tensor.")] = False,
) -> None:
    """Show which rank sends what, in how many collectives, and how much memory that takes.

    Reads the config and the headers of files, no weights; needs none of these ranks.
    """
    with one_line_errors():
        from megatron_policy.cli.refit_lines import lines, tensor_lines
        from megatron_policy.errors import ConfigError

        sizes = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": cp}
        try:
            planned = _planned(refit, sizes, bucket_size, dtype, precision)
        except ConfigError as error:
            raise ConfigError(in_options(str(error))) from error
        for line in lines(planned):
            say(line)
        for line in tensor_lines(planned) if tensors else ():
            say(line)


def _planned(
    source: str, sizes: dict[str, int], bucket_bytes: int, dtype: Dtype | None, precision: Precision
) -> Planned:
    import torch

    from megatron_policy.conversion.headers import read_headers
    from megatron_policy.converters.table import bind
    from megatron_policy.layout import check_layout, layer_split, topology_of
    from megatron_policy.refit.plan import Model, plan_refit

    seen = read_headers(source)
    table = bind(seen.config)
    _check(seen, table)
    config = _config(source, sizes, precision)
    topology = topology_of(config, sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes["cp"])
    check_layout(config, table.architecture, topology)
    split = layer_split(config, table.architecture, topology)
    trained = getattr(torch, precision.value)
    return Planned(
        table,
        topology,
        split,
        plan_refit(
            Model(table, split, seen.dtypes, trained, topology.tp),
            bucket_bytes=bucket_bytes,
            dtype=None if dtype is None else getattr(torch, dtype.value),
        ),
    )


def _check(seen: Headers, table: Table) -> None:
    from megatron_policy.errors import ConversionError

    if seen.problems:
        raise ConversionError("; ".join(seen.problems))
    table.check_hf(seen.shapes, seen.dtypes)


def _config(source: str, sizes: dict[str, int], precision: Precision) -> PolicyConfig:
    """Of a policy that has these sizes. Nothing else of it matters here, but some models are split
    under sequence parallelism only.
    """
    from megatron_policy.config import PolicyConfig

    section: dict[str, Any] = {
        "model_name": source,
        "precision": precision.value,
        "train_global_batch_size": sizes["dp"] * sizes["pp"],
        "train_micro_batch_size": 1,
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": sizes["tp"],
            "pipeline_model_parallel_size": sizes["pp"],
            "virtual_pipeline_model_parallel_size": sizes["vpp"],
            "context_parallel_size": sizes["cp"],
            "sequence_parallel": sizes["tp"] > 1,
        },
    }
    return PolicyConfig.parse(section)
