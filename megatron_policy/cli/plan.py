"""`plan`: what a training step needs on each rank and how fast it can be, or which layouts fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_policy.cli.failures import one_line_errors
from megatron_policy.cli.options import (
    AsJson,
    Dtype,
    Overrides,
    PolicyFileOrNone,
    Precision,
    keys_as_options,
)
from megatron_policy.cli.output import say, say_json
from megatron_policy.cli.plan_advice import advise
from megatron_policy.cli.plan_options import (
    BucketSize,
    Cp,
    Dp,
    Engine,
    Ep,
    Etp,
    FirstLayers,
    Gpu,
    GpuMemory,
    Gpus,
    LastLayers,
    MbTokens,
    Model,
    Pp,
    Recompute,
    Refit,
    Rows,
    SentDtype,
    SeqLen,
    Tensors,
    Tp,
    TrainedDtype,
    Vpp,
    given_options,
    refuse_unread,
)
from megatron_policy.cli.plan_pictures import (
    PictureFile,
    TimelineFile,
    check_files,
    draw_refit,
    draw_step,
)
from megatron_policy.cli.plan_refit import show_refit, with_config
from megatron_policy.cli.plan_report import (
    SHOWN,
    as_data,
    device_of,
    found_lines,
    lines,
    recomputation_keys,
)
from megatron_policy.cli.sizes import parse_size, show_gib

if TYPE_CHECKING:
    from megatron_policy.estimate.devices import DeviceFigures
    from megatron_policy.estimate.plan import Found, StepPlan
    from megatron_policy.estimate.states import ModelRows


def plan(
    config: PolicyFileOrNone = None,
    overrides: Overrides = None,
    model: Model = None,
    refit: Refit = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    beside_engine: Engine = None,
    seq_len: SeqLen = None,
    rows: Rows = None,
    mb_tokens: MbTokens = None,
    tp: Tp = None,
    pp: Pp = None,
    vpp: Vpp = None,
    dp: Dp = None,
    cp: Cp = None,
    ep: Ep = None,
    etp: Etp = None,
    first_layers: FirstLayers = None,
    last_layers: LastLayers = None,
    recompute: Recompute = None,
    as_json: AsJson = False,
    bucket_size: BucketSize = None,
    dtype: SentDtype = None,
    precision: TrainedDtype = None,
    tensors: Tensors = False,
    picture: PictureFile = None,
    timeline: TimelineFile = None,
) -> None:
    """Show what a training step needs on each rank, and the least time it can take.

    Give a CONFIG, or a --model and --gpus; without a layout (--tp and so on) the legal ones are
    searched, and the best that fit are listed. Reads configs and headers, no weights. Pictures are
    of the layout that is given, or of the best.
    """
    given = given_options(locals())
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": cp, "ep": ep, "etp": etp}
    uneven = {"first": first_layers, "last": last_layers}
    trained = precision or Precision.bfloat16
    with one_line_errors(as_json):
        refuse_unread(given)
        check_files(picture, timeline)
    if refit is not None:
        said = (bucket_size, dtype, trained, tensors, as_json)
        _of_refit(refit, layout | uneven, gpus, *said, picture)
        return
    with one_line_errors(as_json):
        device = device_of(gpu or "H100", gpu_memory, beside_engine)
        if config is not None:
            base, found = _of_file(config, overrides, gpus, device, seq_len, as_json)
        else:
            base = _section(model, rows or 512, seq_len, mb_tokens, trained)
            found = _of_model(base, layout, uneven, gpus, device, seq_len, recompute)
    _print(found, None if config else base, gpu or "H100", device, as_json, picture, timeline)
    advice = list(advise(found, base, config is not None, device, seq_len))
    for line in advice:
        say(line, err=as_json)
    if advice:
        raise typer.Exit(1)


def _of_refit(
    source: str,
    layout: dict[str, int | None],
    gpus: int | None,
    bucket_bytes: int | None,
    dtype: Dtype | None,
    precision: Precision,
    tensors: bool,
    as_json: bool,
    picture: Path | None,
) -> None:
    sizes: dict[str, Any] = {axis: layout[axis] or 1 for axis in ("tp", "pp", "vpp", "cp", "ep")}
    sizes |= {"etp": layout["etp"] or sizes["tp"], "first": layout["first"], "last": layout["last"]}
    with one_line_errors(as_json):
        model_ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
        sizes["dp"] = _ranks(model_ranks, layout["dp"], gpus, model_ranks) // model_ranks
    with (
        one_line_errors(as_json),
        keys_as_options(uneven=("--first-layers", "--last-layers")),
    ):
        bucket = parse_size("512MiB") if bucket_bytes is None else bucket_bytes
        planned = show_refit(source, sizes, bucket, dtype, precision, tensors, as_json)
        draw_refit(planned, picture, as_json)


def _ranks(model_ranks: int, dp: int | None, gpus: int | None, fewest: int) -> int:
    """The number of ranks, of which `model_ranks` are a replica; `fewest` if nothing says it."""
    from megatron_policy.errors import ConfigError

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


def _rows(model: str) -> ModelRows:
    from megatron_policy.convert.headers import read_headers
    from megatron_policy.converters.formats.hf_config import CONFIG, read_config
    from megatron_policy.converters.table import bind
    from megatron_policy.estimate.states import ModelRows

    source = with_config(model)
    alone = Path(source).name == CONFIG
    return ModelRows.of(bind(read_config(source) if alone else read_headers(source).config))


def _of_file(
    path: Path,
    overrides: list[str] | None,
    gpus: int | None,
    device: DeviceFigures,
    length: int | None,
    as_json: bool,
) -> tuple[Mapping[str, Any], StepPlan | Found]:
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


def _section(
    model: str | None,
    rows: int,
    length: int | None,
    mb_tokens: int | None,
    precision: Precision,
) -> dict[str, Any]:
    """A `policy` section with packed microbatches and all that makes training fast on GPUs."""
    from megatron_policy.errors import ConfigError

    if model is None:
        raise ConfigError("give a CONFIG, --model DIR or --refit CHECKPOINT")
    length = length or min(4096, mb_tokens or 4096)
    if mb_tokens is not None and mb_tokens < length:
        raise ConfigError(
            f"--seq-len {length} does not fit into microbatches of --mb-tokens {mb_tokens}: raise "
            "it to at least as many"
        )
    return {
        "model_name": model,
        "precision": precision.value,
        "train_global_batch_size": rows,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": length,
        "sequence_packing": {"enabled": True, "train_mb_tokens": mb_tokens or length},
        "megatron_cfg": {
            "enabled": True,
            "bias_activation_fusion": True,
            "apply_rope_fusion": True,
            "optimizer": {"use_distributed_optimizer": True},
            "distributed_data_parallel_config": {
                "grad_reduce_in_fp32": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
        },
    }


def _of_model(
    base: dict[str, Any],
    layout: dict[str, int | None],
    uneven: dict[str, int | None],
    gpus: int | None,
    device: DeviceFigures,
    length: int | None,
    recompute: str | None,
) -> StepPlan | Found:
    from megatron_policy.cli.config_report import fewest_ranks
    from megatron_policy.config import PolicyConfig
    from megatron_policy.errors import ConfigError
    from megatron_policy.estimate.plan import plan_of, search

    rows = _rows(base["model_name"])
    if all(size is None for size in (*layout.values(), *uneven.values())):
        if gpus is None:
            raise ConfigError("--gpus is missing: give the number of GPUs, or a layout")
        if recompute is not None:
            raise ConfigError("--recompute needs a layout (--tp and so on): a search tries all")
        return search(base, rows, gpus, device, length)
    size = {axis: layout[axis] or 1 for axis in ("tp", "pp", "vpp", "cp", "ep")}
    keys = {
        "tensor_model_parallel_size": size["tp"],
        "sequence_parallel": size["tp"] > 1,
        "pipeline_model_parallel_size": size["pp"],
        "virtual_pipeline_model_parallel_size": size["vpp"],
        "context_parallel_size": size["cp"],
        "expert_model_parallel_size": size["ep"],
        "expert_tensor_parallel_size": layout["etp"],
        "num_layers_in_first_pipeline_stage": uneven["first"],
        "num_layers_in_last_pipeline_stage": uneven["last"],
        **recomputation_keys(recompute or "none"),
    }
    with keys_as_options(uneven=("--first-layers", "--last-layers")):
        config = PolicyConfig.parse({**base, "megatron_cfg": {**base["megatron_cfg"], **keys}})
        model_ranks = size["tp"] * size["pp"] * size["cp"]
        ranks = _ranks(model_ranks, layout["dp"], gpus, fewest_ranks(config))
        return plan_of(config, rows, ranks, device, length)


def _print(
    found: StepPlan | Found,
    base: Mapping[str, Any] | None,
    gpu: str,
    device: DeviceFigures,
    as_json: bool,
    picture: Path | None,
    timeline: Path | None,
) -> None:
    from megatron_policy.estimate.plan import Found

    name = f"{gpu.upper()} of {show_gib(device.memory_bytes)}"
    plans = [*found.fitting, *found.too_large] if isinstance(found, Found) else [found]
    if as_json:
        say_json([as_data(each, base) for each in plans[:SHOWN]])
    else:
        shown = (
            found_lines(found, name, base or {}) if isinstance(found, Found) else lines(found, name)
        )
        for line in shown:
            say(line)
    if plans:
        with one_line_errors(as_json):
            draw_step(plans[0], name, picture, timeline, as_json)
