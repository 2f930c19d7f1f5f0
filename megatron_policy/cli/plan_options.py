"""The options of `plan`, and which of them have an effect beside others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from shlex import quote
from typing import Annotated, Any, get_args

import typer

from megatron_policy.cli.options import Dtype, Precision, parse_gpu_memory, parse_size

_Size = int | None
Gpus = Annotated[_Size, typer.Option(min=1, help="Number of GPUs.")]
GpuMemory = Annotated[
    _Size, typer.Option(parser=parse_gpu_memory, metavar="SIZE", help="Its memory, if another.")
]
SeqLen = Annotated[
    _Size,
    typer.Option(
        min=1,
        help="Tokens of each row. By default the least of 4096 (of a CONFIG, its "
        "max_total_sequence_length), --mb-tokens and the model's positions.",
    ),
]
Patches = Annotated[
    _Size,
    typer.Option(min=1, help="Patches of each row's picture, of a model that sees pictures."),
]
Frames = Annotated[
    _Size, typer.Option(min=1, help="Frames of each row's sound, of a model that hears.")
]
Rows = Annotated[
    _Size, typer.Option(min=1, help="Rows of a global batch, with --model; 512 by default.")
]
Gpu = Annotated[
    str | None, typer.Option(help="A100, H100, H200 or B200. By default H100, with --refit none.")
]
MbTokens = Annotated[
    _Size, typer.Option(min=1, help="Tokens of a packed microbatch, with --model.")
]
Tp = Annotated[_Size, typer.Option(min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[_Size, typer.Option(min=1, help="Pipeline stages.")]
Vpp = Annotated[_Size, typer.Option(min=1, help="Model chunks of a stage.")]
Dp = Annotated[_Size, typer.Option(min=1, help="Data-parallel replicas.")]
Cp = Annotated[_Size, typer.Option(min=1, help="Context-parallel ranks.")]
Ep = Annotated[_Size, typer.Option(min=1, help="Expert-parallel ranks.")]
Etp = Annotated[
    _Size, typer.Option(min=1, help="Tensor-parallel ranks of experts, if not as --tp.")
]
FirstLayers = Annotated[
    _Size, typer.Option(min=1, help="Layers of the first stage, if not as the others'.")
]
LastLayers = Annotated[
    _Size, typer.Option(min=1, help="Layers of the last stage, if not as the others'.")
]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="none, full, or modules as in layernorm+mlp, with --model and a layout.",
    ),
]
BucketSize = Annotated[
    _Size,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="With --refit: limit for the bytes that a collective moves; 512MiB by default.",
    ),
]
TrainedDtype = Annotated[
    Precision | None,
    typer.Option(help="Dtype that the model is trained in; bfloat16 by default."),
]
SentDtype = Annotated[
    Dtype | None,
    typer.Option(help="With --refit: dtype of the sent weights, if not that of CHECKPOINT."),
]
Engine = Annotated[
    float | None,
    typer.Option(
        "--beside-engine",
        min=0.0,
        metavar="GIB",
        help="Memory that an inference engine on the same GPUs keeps during training.",
    ),
]
EngineLayout = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="With --refit: the engine's ranks, as tp=8,dp=2,ep=16: what each gets of its own.",
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        metavar="FIGURES",
        help="With --engine-layout: gpus_per_node=8,nvlink_GBps=450,network_GBps=50, each way and "
        "of each GPU; what is not given is that of --gpu.",
    ),
]
SharedNodes = Annotated[
    bool,
    typer.Option(
        "--shared-nodes",
        help="With --machine or --gpu: the engine's ranks begin on the GPUs that trainers leave of "
        "a node, not on a node of their own.",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        min=0.0001,
        max=1.0,
        metavar="SHARE",
        help="With --refit: what a refit sends of which this share of all elements has changed.",
    ),
]
Tensors = Annotated[
    bool, typer.Option("--tensors", help="With --refit: print a line for every tensor.")
]

Model = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A model, or its config.json, in place of a CONFIG."),
]
Refit = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Show what a refit of this checkpoint, or of its config.json, moves.",
    ),
]


_OF_REFIT = (
    *("refit", "gpus", "bucket-size", "dtype", "precision", "tensors", "json", "picture"),
    *("engine-layout", "delta", "tp", "pp", "vpp", "dp", "cp", "ep", "etp"),
    *("first-layers", "last-layers"),
)
_OF_CONFIG = (
    *("config", "overrides", "gpus", "gpu", "gpu-memory", "beside-engine", "seq-len"),
    *("patches", "frames", "json", "picture", "timeline"),
)
_OF_LINKS = ("gpu", "machine", "shared-nodes")
_OF_REFIT_ALONE = (
    *("bucket-size", "dtype", "tensors", "engine-layout", "delta", "machine", "shared-nodes"),
)
_KEYS = {
    "model": "model_name",
    "rows": "train_global_batch_size",
    "mb-tokens": "sequence_packing.train_mb_tokens",
    "precision": "precision",
}
"""The keys of a CONFIG that say what these options say of a --model, beside those of sizes."""


def given_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that somebody gave, by the names of options."""
    there = {name: value for name, value in arguments.items() if value not in (None, [])}
    return {name.replace("_", "-"): value for name, value in there.items()}


def refuse_unread(given: dict[str, Any]) -> None:
    """ConfigError about options that have no effect beside the others."""
    from megatron_policy.errors import ConfigError

    names = [
        "json" if name == "as-json" else name for name, value in given.items() if value is not False
    ]
    if "refit" in names:
        read = (*_OF_REFIT, *_OF_LINKS) if "engine-layout" in names else _OF_REFIT
        unread, reason = [n for n in names if n not in read], "with --refit"
        if unread and set(unread) <= set(_OF_LINKS):
            reason += " without --engine-layout"
    elif "config" in names:
        unread = [name for name in names if name not in _OF_CONFIG]
        reason = f"with a CONFIG{_in_config(unread, given)}"
    else:
        unread, reason = [n for n in names if n in _OF_REFIT_ALONE], "without --refit"
    if unread:
        shown = ["a CONFIG" if name == "config" else f"--{name}" for name in unread]
        raise ConfigError(f"{', '.join(shown)} cannot be given {reason}")


def parse_recompute(text: str) -> dict[str, Any]:
    """The keys of `megatron_cfg` for --recompute; ConfigError for a module that is not known."""
    from megatron_policy.config.megatron_sections import RecomputedModule, recompute_keys
    from megatron_policy.errors import ConfigError

    known = get_args(RecomputedModule)
    unknown = [name for name in text.split("+") if name not in known]
    if text not in ("none", "full") and unknown:
        raise ConfigError(
            f"--recompute {text}: {unknown[0]!r} is not known; give none, full, or modules of "
            f"{', '.join(known)} joined by +"
        )
    return recompute_keys(text)


def _in_config(unread: list[str], given: dict[str, Any]) -> str:
    """How a CONFIG says what these options do, as the end of a refusal."""
    from megatron_policy.config.parallel_sizes import MEGATRON_SIZES

    sizes = {name.replace("_", "-"): f"megatron_cfg.{key}" for name, key in MEGATRON_SIZES.items()}
    known = _KEYS | sizes
    keys = {known[name]: given[name] for name in unread if name in known}
    if "recompute" in unread:
        how = parse_recompute(given["recompute"])
        keys |= {f"megatron_cfg.{key}": value for key, value in how.items()}
    ways = [f"write {' '.join(as_overrides(keys))} after the file"] if keys else []
    ways += ["give --gpus, and replicas follow from the layout"] if "dp" in unread else []
    ways += ["leave out what is for --refit"] if set(unread) & set(_OF_REFIT_ALONE) else []
    return f", which says it: {'; '.join(ways)}"


def as_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Keys as KEY=VALUE, for a shell."""
    return [
        quote(f"{key}={value if isinstance(value, str) else json.dumps(value).replace(' ', '')}")
        for key, value in keys.items()
    ]
