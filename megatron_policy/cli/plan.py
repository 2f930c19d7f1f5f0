"""`plan`: what a training step needs on each rank and how fast it can be, or which layouts fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_policy.cli import plan_options as options
from megatron_policy.cli.failures import one_line_errors
from megatron_policy.cli.options import (
    AsJson,
    Overrides,
    PolicyFileOrNone,
    Precision,
    keys_as_options,
)
from megatron_policy.cli.output import say
from megatron_policy.cli.plan_advice import advise
from megatron_policy.cli.plan_pictures import (
    PictureFile,
    TimelineFile,
    check_files,
    draw_refit,
    draw_step,
)
from megatron_policy.cli.plan_refit import refit_of, report_refit, with_config
from megatron_policy.cli.plan_report import device_of, plans_of, recomputation_keys, report_plans
from megatron_policy.cli.report import show
from megatron_policy.cli.sizes import show_gib

if TYPE_CHECKING:
    from megatron_policy.estimate.devices import DeviceFigures
    from megatron_policy.estimate.plan import SearchResult, StepPlan


def plan(
    config: PolicyFileOrNone = None,
    overrides: Overrides = None,
    model: options.Model = None,
    refit: options.Refit = None,
    gpus: options.Gpus = None,
    gpu: options.Gpu = None,
    gpu_memory: options.GpuMemory = None,
    beside_engine: options.Engine = None,
    seq_len: options.SeqLen = None,
    rows: options.Rows = None,
    mb_tokens: options.MbTokens = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    vpp: options.Vpp = None,
    dp: options.Dp = None,
    cp: options.Cp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    first_layers: options.FirstLayers = None,
    last_layers: options.LastLayers = None,
    recompute: options.Recompute = None,
    as_json: AsJson = False,
    bucket_size: options.BucketSize = None,
    dtype: options.SentDtype = None,
    precision: options.TrainedDtype = None,
    tensors: options.Tensors = False,
    picture: PictureFile = None,
    timeline: TimelineFile = None,
) -> None:
    """Show what a training step needs on each rank, and the least time it can take.

    Give a CONFIG, or a --model and --gpus; without a layout (--tp and so on) the legal ones are
    searched, and the best that fit are listed. Reads configs and headers, no weights. Pictures are
    of the layout that is given, or of the best.
    """
    given = options.given_options(locals())
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": cp, "ep": ep, "etp": etp}
    layout |= {"first_layers": first_layers, "last_layers": last_layers}
    trained = precision or Precision.bfloat16
    with one_line_errors(as_json):
        options.refuse_unread(given)
        check_files(picture, timeline)
        if refit is not None:
            with keys_as_options(uneven=True):
                sizes = _complete_sizes(layout)
                ranks = _count_ranks(sizes, layout["dp"], gpus, _ranks_of_replica(sizes))
                planned = refit_of(refit, sizes, ranks, bucket_size, dtype, trained)
                show(report_refit(planned, tensors), as_json)
                draw_refit(planned, picture, as_json)
            return
        device = device_of(gpu or "H100", gpu_memory, beside_engine)
        if config is not None:
            base, found = _plan_file(config, overrides, gpus, device, seq_len, as_json)
        else:
            base = _make_section(model, rows or 512, seq_len, mb_tokens, trained)
            found = _plan_model(base, layout, gpus, device, seq_len, recompute)
    name = f"{(gpu or 'H100').upper()} of {show_gib(device.memory_bytes)}"
    show(report_plans(found, name, None if config else base), as_json)
    if plans := plans_of(found):
        with one_line_errors(as_json):
            draw_step(plans[0], name, picture, timeline, as_json)
    advice = list(advise(found, base, config is not None, device, seq_len))
    for line in advice:
        say(line, err=as_json)
    if advice:
        raise typer.Exit(1)


def _complete_sizes(layout: Mapping[str, int | None]) -> dict[str, Any]:
    """Sizes by the names of `MEGATRON_SIZES`, of which those that are not given are 1."""
    sizes: dict[str, Any] = {axis: layout[axis] or 1 for axis in ("tp", "pp", "vpp", "cp", "ep")}
    others = {name: layout[name] for name in ("etp", "first_layers", "last_layers")}
    return sizes | others | {"sequence_parallel": sizes["tp"] > 1}


def _ranks_of_replica(sizes: Mapping[str, Any]) -> int:
    ranks: int = sizes["tp"] * sizes["pp"] * sizes["cp"]
    return ranks


def _count_ranks(sizes: Mapping[str, Any], dp: int | None, gpus: int | None, fewest: int) -> int:
    """The number of ranks for a layout of these sizes; `fewest` if nothing says it."""
    from megatron_policy.errors import ConfigError

    model_ranks = _ranks_of_replica(sizes)
    wanted = gpus or (fewest if dp is None else model_ranks * dp)
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


def _plan_file(
    path: Path,
    overrides: list[str] | None,
    gpus: int | None,
    device: DeviceFigures,
    length: int | None,
    as_json: bool,
) -> tuple[Mapping[str, Any], StepPlan]:
    """The section `policy` of the file, and its plan."""
    from megatron_policy.cli.config_report import fewest_ranks
    from megatron_policy.config import PolicyConfig
    from megatron_policy.config.adapters import trained_table
    from megatron_policy.config.composed import compose
    from megatron_policy.estimate.plan import plan_of
    from megatron_policy.estimate.states import ModelRows

    section = compose(path, overrides or ()).policy
    config = PolicyConfig.parse(section)
    rows = ModelRows.of(trained_table(config))
    found = plan_of(config, rows, gpus or fewest_ranks(config), device, length)
    if gpus is None:
        ranks = found.topology.world_size
        shown = f"{ranks} rank{'s' * (ranks != 1)}"
        say(f"without --gpus: on {shown}, the fewest that hold the layout", err=as_json)
    return section, found


def _make_section(
    model: str | None,
    rows: int,
    length: int | None,
    mb_tokens: int | None,
    precision: Precision,
) -> dict[str, Any]:
    """A `policy` section with packed microbatches and all that makes training fast on GPUs."""
    from megatron_policy.config.policy_config import least_section
    from megatron_policy.errors import ConfigError

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


def _plan_model(
    base: dict[str, Any],
    layout: dict[str, int | None],
    gpus: int | None,
    device: DeviceFigures,
    length: int | None,
    recompute: str | None,
) -> StepPlan | SearchResult:
    from megatron_policy.cli.config_report import fewest_ranks
    from megatron_policy.config import PolicyConfig
    from megatron_policy.config.parallel_sizes import keys_of_sizes
    from megatron_policy.convert.headers import read_headers
    from megatron_policy.converters.formats.hf_config import CONFIG, read_config
    from megatron_policy.converters.table import bind
    from megatron_policy.errors import ConfigError
    from megatron_policy.estimate.plan import plan_of, search
    from megatron_policy.estimate.states import ModelRows

    source = with_config(base["model_name"])
    alone = Path(source).name == CONFIG
    rows = ModelRows.of(bind(read_config(source) if alone else read_headers(source).config))
    if all(size is None for size in layout.values()):
        if gpus is None:
            raise ConfigError("--gpus is missing: give the number of GPUs, or a layout")
        if recompute is not None:
            raise ConfigError("--recompute needs a layout (--tp and so on): a search tries all")
        return search(base, rows, gpus, device, length)
    sizes = _complete_sizes(layout)
    keys = keys_of_sizes(sizes) | recomputation_keys(recompute or "none")
    with keys_as_options(uneven=True):
        config = PolicyConfig.parse({**base, "megatron_cfg": {**base["megatron_cfg"], **keys}})
        ranks = _count_ranks(sizes, layout["dp"], gpus, fewest_ranks(config))
        return plan_of(config, rows, ranks, device, length)
