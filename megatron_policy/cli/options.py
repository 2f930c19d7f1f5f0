"""Options shared by several commands, and numbers of bytes as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MAX_MEMORY, LEAST_MEMORY = "2GiB", 2**20
_DECIMAL, _BINARY = ("", "k", "m", "g", "t"), ("", "ki", "mi", "gi", "ti")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


class Dtype(StrEnum):
    """Dtypes of weights in a checkpoint."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Precision(StrEnum):
    """What a model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def parse_size(text: str) -> int:
    """Bytes from "64MiB", "5GB" or "1048576"; a usage error listing the forms for anything else."""
    match = _SIZE.fullmatch(text.strip())
    prefix = match[2].lower() if match else "?"
    if match is None or prefix == "i":
        raise typer.BadParameter(f"{text!r} is not a size; write for example 64MiB, 5GB or 1048576")
    unit = 1000 ** _DECIMAL.index(prefix) if prefix in _DECIMAL else 1024 ** _BINARY.index(prefix)
    size = int(float(match[1]) * unit)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is too small; it must be at least one byte")
    return size


def parse_gpu_memory(text: str) -> int:
    """As `parse_size`, of a GPU's memory; a usage error below 1 GiB, which is a unit left out."""
    size = parse_size(text)
    if size < 2**30:
        raise typer.BadParameter(f"{text} is {size} bytes, no GPU's memory; write {text}GiB")
    return size


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
    with _replace_words(_OPTION_OF_ARGUMENT):
        yield


@contextmanager
def keys_as_options(uneven: bool = False) -> Iterator[None]:
    """Name a command's options in place of configuration keys in a ConfigError. Unless it has some
    for `uneven` stages, the advice to set the layers of the first and the last one is left out.
    """
    from megatron_policy.config.parallel_sizes import MEGATRON_SIZES

    ends = [key for name, key in MEGATRON_SIZES.items() if name.endswith("_layers")]
    pairs = [] if uneven else [(f", or set {' or '.join(ends)}", "")]
    for name, key in sorted(MEGATRON_SIZES.items(), key=lambda pair: -len(pair[1])):
        option = f"--{name.replace('_', '-')}"
        if name == "sequence_parallel":
            pairs += [(f"policy.megatron_cfg.{key}=true", option), (f"{key}=true", option)]
        elif uneven or key not in ends:
            for written, named in ((f"{key}=", f"{option} "), (key, option)):
                pairs += [(f"policy.megatron_cfg.{written}", named), (written, named)]
    with _replace_words([*pairs, ("policy.megatron_cfg: ", "")]):
        yield


@contextmanager
def _replace_words(pairs: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Replace words in the message of a ConfigError of this context."""
    from megatron_policy.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        message = str(error)
        for written, named in pairs:
            message = message.replace(written, named)
        raise ConfigError(message) from error
