"""What `plan` is asked about: a device, a configuration or a model with its layout, and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.cli.config_report import fewest_ranks
from megatron_policy.cli.options import Precision, keys_as_options
from megatron_policy.cli.output import say
from megatron_policy.cli.plan_options import parse_recompute
from megatron_policy.cli.plan_refit import with_config
from megatron_policy.config import PolicyConfig
from megatron_policy.config.composed import compose
from megatron_policy.config.parallel_sizes import keys_of_sizes
from megatron_policy.config.policy_config import least_section
from megatron_policy.convert.headers import read_headers
from megatron_policy.converters.formats.hf_config import CONFIG
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.devices import SHORT, DeviceFigures
from megatron_policy.estimate.plan import SearchResult, StepPlan, plan_of, search
from megatron_policy.estimate.states import ModelRows
from megatron_policy.estimate.tower import RowMedia as RowMedia


def device_of(name: str, memory: int | None, engine_gib: float | None) -> DeviceFigures:
    """The GPU that plans are for, with another memory if it is given."""
    found = SHORT.get(name.upper())
    if found is None:
        raise ConfigError(f"--gpu {name} is not known: use one of {', '.join(SHORT)}")
    return replace(
        found,
        memory_bytes=memory or found.memory_bytes,
        engine_bytes=int((engine_gib or 0.0) * 2**30),
    )


def complete_sizes(layout: Mapping[str, int | None]) -> dict[str, Any]:
    """Sizes by the names of `MEGATRON_SIZES`, of which those that are not given are 1."""
    sizes: dict[str, Any] = {axis: layout[axis] or 1 for axis in ("tp", "pp", "vpp", "cp", "ep")}
    others = {name: layout[name] for name in ("etp", "first_layers", "last_layers")}
    return sizes | others | {"sequence_parallel": sizes["tp"] > 1}


def count_ranks(
    sizes: Mapping[str, Any], dp: int | None, gpus: int | None, fewest: int | None = None
) -> int:
    """The number of ranks for a layout of these sizes; if nothing says it, `fewest`, or those of
    one replica.
    """
    model_ranks: int = sizes["tp"] * sizes["pp"] * sizes["cp"]
    wanted = gpus or (model_ranks * dp if dp else fewest or model_ranks)
    if dp is not None and model_ranks * dp != wanted:
        raise ConfigError(
            f"--gpus {gpus} are not --dp {dp} replicas of {model_ranks} ranks: leave one of both "
            f"out, or use --gpus {model_ranks * dp}"
        )
    if wanted % model_ranks:
        raise ConfigError(
            f"--gpus {gpus} is not a multiple of the {model_ranks} ranks of a replica"
        )
    return wanted


def plan_file(
    path: Path,
    overrides: list[str] | None,
    gpus: int | None,
    device: DeviceFigures,
    of_rows: tuple[int | None, RowMedia],
    as_json: bool,
) -> tuple[Mapping[str, Any], StepPlan | SearchResult]:
    """The section `policy` of the file, and its plan; `of_rows`: tokens and media of each."""
    section = compose(path, overrides or ()).policy
    config = PolicyConfig.parse(section)
    rows = ModelRows.of(bind_tables(config)[1])
    found = plan_of(config, rows, gpus or fewest_ranks(config), device, *of_rows)
    if gpus is None:
        ranks = found.topology.world_size
        shown = f"{ranks} rank{'s' * (ranks != 1)}"
        say(f"without --gpus: on {shown}, the fewest that hold the layout", err=as_json)
    return section, found


def make_section(
    model: str | None,
    rows: int,
    length: int | None,
    mb_tokens: int | None,
    precision: Precision,
) -> dict[str, Any]:
    """A `policy` section with packed microbatches and all that makes training fast on GPUs."""
    if model is None:
        raise ConfigError("give a CONFIG, --model DIR or --refit CHECKPOINT")
    length = length or min(4096, mb_tokens or 4096)
    if mb_tokens is not None and mb_tokens < length:
        raise ConfigError(
            f"--seq-len {length} does not fit into microbatches of --mb-tokens {mb_tokens}: raise "
            "it to at least as many"
        )
    overlaps = dict.fromkeys(
        ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"), True
    )
    return least_section(
        model,
        precision.value,
        rows,
        {
            "bias_activation_fusion": True,
            "apply_rope_fusion": True,
            "optimizer": {"use_distributed_optimizer": True},
            "distributed_data_parallel_config": overlaps,
        },
        max_total_sequence_length=length,
        sequence_packing={"enabled": True, "train_mb_tokens": mb_tokens or length},
    )


def plan_model(
    base: dict[str, Any],
    layout: dict[str, int | None],
    gpus: int | None,
    device: DeviceFigures,
    of_rows: tuple[int | None, RowMedia],
    recompute: str | None,
) -> StepPlan | SearchResult:
    """The plan of a layout of the model of `base`, or without one a search."""
    source = with_config(base["model_name"])
    alone = Path(source).name == CONFIG
    rows = ModelRows.of(open_model(source).table if alone else read_headers(source).bind_table())
    if all(size is None for size in layout.values()):
        if gpus is None:
            raise ConfigError("--gpus is missing: give the number of GPUs, or a layout")
        if recompute is not None:
            raise ConfigError("--recompute needs a layout (--tp and so on): a search tries all")
        return search(base, rows, gpus, device, *of_rows)
    sizes = complete_sizes(layout)
    keys = keys_of_sizes(sizes) | parse_recompute(recompute or "none")
    with keys_as_options(uneven=True):
        config = PolicyConfig.parse({**base, "megatron_cfg": {**base["megatron_cfg"], **keys}})
        ranks = count_ranks(sizes, layout["dp"], gpus, fewest_ranks(config))
        return plan_of(config, rows, ranks, device, *of_rows)
