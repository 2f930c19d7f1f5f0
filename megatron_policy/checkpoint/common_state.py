"""The common state of a training checkpoint: what does not belong to any single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_policy.checkpoint.manifest import REMEDY
from megatron_policy.converters.files.contained import inside
from megatron_policy.converters.formats.dist_writing import COMMON
from megatron_policy.errors import CheckpointError

OURS = "megatron_policy"
"""Key of this package's own entry there, next to Megatron-Core's."""


def read_ours(root: Path) -> dict[str, Any]:
    """This package's part of the common state; CheckpointError if it cannot be read."""
    try:
        content = torch.load(inside(root, COMMON), map_location="cpu", weights_only=True)[OURS]
        return {**content, **{key: content[key] for key in ("host_data", "source_dtypes")}}
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{root / COMMON} is damaged: {error!r:.200}. {REMEDY}") from error


def source_dtypes(root: Path) -> dict[str, torch.dtype]:
    """The dtypes that the weights had in Hugging Face format, and are exported with."""
    found = {name: getattr(torch, each) for name, each in read_ours(root)["source_dtypes"].items()}
    assert all(isinstance(dtype, torch.dtype) for dtype in found.values()), found
    return found
