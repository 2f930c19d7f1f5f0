"""The common state of a training checkpoint: what does not belong to any single rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_policy.checkpoint.manifest import REMEDY
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.files.contained import inside
from megatron_policy.converters.formats.dist_writing import COMMON
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.manifest import text

OURS = "megatron_policy"
"""Key of this package's own entry there, next to Megatron-Core's."""
_SECTIONS = ("host_data", "source_dtypes")
_OPTIONAL_SECTIONS = frozenset({"adapters_of", "schedule"})


def compose(
    architecture: Architecture, step: int, ours: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The common state of a checkpoint after that step, with `ours` as this package's entry."""
    return {
        "checkpoint_version": 3.0,
        "iteration": step,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not architecture.uniform_layers,
        },
        **({} if ours is None else {OURS: ours}),
    }


def read_ours(root: Path) -> dict[str, Any]:
    """This package's part of the common state; CheckpointError if it cannot be read."""
    try:
        content = torch.load(inside(root, COMMON), map_location="cpu", weights_only=True)[OURS]
        for key in (*_SECTIONS, *(_OPTIONAL_SECTIONS & content.keys())):
            if not isinstance(content[key], dict):
                raise ValueError(f"its {key} is not a dictionary")
        step = content.get("optimizer_step")
        if not (step is None or (type(step) is int and step >= 0)):
            raise ValueError(f"its optimizer_step is {step!r:.40}, not a number of steps")
        return dict(content)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{root / COMMON} is damaged: {error!r:.200}. {REMEDY}") from error


def source_dtypes(root: Path) -> dict[str, torch.dtype]:
    """The dtypes that the weights had in Hugging Face format, and are exported with;
    CheckpointError for anything that is not the name of a dtype.
    """
    stated = read_ours(root)["source_dtypes"]
    try:
        return {text(name): dtype_named(each) for name, each in stated.items()}
    except ValueError as error:
        raise CheckpointError(f"{root / COMMON} is damaged: {error}. {REMEDY}") from error
