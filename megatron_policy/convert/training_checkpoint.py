"""What conversion asks of a training checkpoint; knows no other format.

The package of checkpoints digests with this one's functions: it is imported when it is asked.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_policy.errors import CheckpointError, ConversionError


def is_saved(root: Path) -> bool:
    """Whether a policy saved it, with digests of its own kind."""
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
    """ConversionError, naming the first of them, if any bytes are not those that were saved."""
    from megatron_policy.checkpoint.verifying import verify

    try:
        verify(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
