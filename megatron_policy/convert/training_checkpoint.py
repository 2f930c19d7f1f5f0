"""What conversion needs to know of a training checkpoint.

The checkpoint package uses this package's digest functions, so it is imported lazily.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_policy.errors import CheckpointError, ConversionError


def is_saved(root: Path) -> bool:
    """Whether it is a training checkpoint that a policy saved, with its own kind of digests."""
    from megatron_policy.checkpoint.tracker import is_saved

    return is_saved(root)


def source_dtypes(root: Path) -> dict[str, torch.dtype]:
    """The dtypes that the weights had in Hugging Face format; ConversionError if it is damaged."""
    from megatron_policy.checkpoint.common_state import source_dtypes

    try:
        return source_dtypes(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def check_bytes(root: Path) -> None:
    """Raise ConversionError, naming the first, if any bytes differ from those that were saved."""
    from megatron_policy.checkpoint.verifying import verify

    try:
        verify(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
