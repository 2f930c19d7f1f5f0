"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_policy.cli.sizes import parse_size

MAX_MEMORY, LEAST_MEMORY = "2GiB", 2**20


class Dtype(StrEnum):
    """Dtypes of weights in a checkpoint."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Precision(StrEnum):
    """What a model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def parse_memory(text: str) -> int:
    """Parse a size that is large enough to work with."""
    size = parse_size(text)
    if size < LEAST_MEMORY:
        raise typer.BadParameter(f"{text} is too small; it must be at least 1MiB")
    return size


MaxMemory = Annotated[
    int,
    typer.Option(
        parser=parse_memory,
        metavar="SIZE",
        help="Limit for the weights in memory at a time; at least 1MiB.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model of a Megatron checkpoint without config.json: name, directory, or that "
        "file.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")]
_POLICY_FILE = typer.Argument(
    metavar="CONFIG", help="A YAML file with a `policy` section, or with its keys alone."
)
PolicyFile = Annotated[Path, _POLICY_FILE]
PolicyFileOrNone = Annotated[Path | None, _POLICY_FILE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys to change, as in megatron_cfg.optimizer.lr=1e-6."
    ),
]

_OPTION_OF_KEY = (
    ("tensor_model_parallel_size", "--tp"),
    ("virtual_pipeline_model_parallel_size", "--vpp"),
    ("pipeline_model_parallel_size", "--pp"),
    ("context_parallel_size", "--cp"),
    ("expert_model_parallel_size", "--ep"),
    ("expert_tensor_parallel_size", "--etp"),
)
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_WITHOUT_OPTION = f", or set {_UNEVEN[0]} or {_UNEVEN[1]}"

_OPTION_OF_ARGUMENT = (
    ("overwrite=True", "--overwrite"),
    ("to='hf'", "--to hf"),
    ("to='mcore'", "--to mcore"),
    ("base=", "--base"),
    ("merge=True", "--merge"),
    ("dtype='bfloat16'", "--dtype bfloat16"),
    ("max_memory is", "--max-memory is"),
    ("max_shard_size is", "--max-shard-size is"),
)


@contextmanager
def arguments_as_options() -> Iterator[None]:
    """Replace the arguments of functions in errors by the command's options."""
    from megatron_policy.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        message = str(error)
        for written, said in _OPTION_OF_ARGUMENT:
            message = message.replace(written, said)
        raise ConfigError(message) from error


@contextmanager
def keys_as_options(uneven: tuple[str, str] | None = None) -> Iterator[None]:
    """Name a command's options in place of configuration keys in a ConfigError.

    `uneven` are the options for the layers of the first and the last stage. Without them, the
    advice to set these keys is left out.
    """
    from megatron_policy.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise ConfigError(_in_options(str(error), uneven)) from error


def _in_options(message: str, uneven: tuple[str, str] | None) -> str:
    if uneven is None:
        message = message.replace(_WITHOUT_OPTION, "")
    for key, option in (*_OPTION_OF_KEY, *zip(_UNEVEN, uneven or (), strict=False)):
        for written, said in ((f"{key}=", f"{option} "), (key, option)):
            message = message.replace(f"policy.megatron_cfg.{written}", said)
            message = message.replace(written, said)
    for written, said in (("sequence_parallel=true", "--sequence-parallel"),):
        message = message.replace(f"policy.megatron_cfg.{written}", said).replace(written, said)
    return message.replace("policy.megatron_cfg: ", "")
