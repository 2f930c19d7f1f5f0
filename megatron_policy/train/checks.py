"""What data must look like before any rank computes with them; knows no model but its vocabulary.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError


def checked_tokens(data: BatchedDataDict, vocab_size: int) -> torch.Tensor:
    """`input_ids` int64 `[B, S]`; BatchError unless they are there and within the vocabulary."""
    tokens_BS = data.get("input_ids")
    if not isinstance(tokens_BS, torch.Tensor):
        raise BatchError(f"the data lack a tensor 'input_ids'; they have {sorted(data)}")
    if tokens_BS.ndim != 2 or not tokens_BS.numel() or tokens_BS.is_floating_point():
        raise BatchError(
            f"input_ids are {tokens_BS.dtype} of shape {tuple(tokens_BS.shape)}; they must be "
            "integers [B, S] with at least one row and one position"
        )
    outside = (tokens_BS < 0) | (tokens_BS >= vocab_size)
    if outside.any():
        row, position = outside.nonzero()[0].tolist()
        raise BatchError(
            f"input_ids has token {tokens_BS[row, position]} in row {row} at position {position}, "
            f"but the model's vocabulary has {vocab_size} entries: is it this model's tokenizer?"
        )
    return tokens_BS.long()


def checked_prompts(
    data: BatchedDataDict, vocab_size: int, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` int64 `[B, S]` and `input_lengths` int64 `[B]`, ready to be continued.

    BatchError naming the key, or the first row whose prompt is empty or leaves no room below
    `max_length` positions.
    """
    tokens_BS, lengths_B = checked_tokens(data, vocab_size), data.get("input_lengths")
    rows, width = tokens_BS.shape
    if not isinstance(lengths_B, torch.Tensor):
        raise BatchError(f"the data lack a tensor 'input_lengths'; they have {sorted(data)}")
    if lengths_B.shape != (rows,) or lengths_B.is_floating_point():
        raise BatchError(
            f"input_lengths are {lengths_B.dtype} of shape {tuple(lengths_B.shape)}; they must be "
            f"integers [{rows}], one for each row of input_ids"
        )
    longest = min(width, max_length - 1)
    for row, length in enumerate(lengths_B.tolist()):
        if not 1 <= length <= longest:
            raise BatchError(
                f"input_lengths has {length} in row {row}; a prompt's length must lie between 1 "
                f"and {longest} (input_ids are {width} wide, max_total_sequence_length is "
                f"{max_length})"
            )
    return tokens_BS, lengths_B.long()


def check_training_data(data: BatchedDataDict, vocab_size: int) -> None:
    """BatchError naming the key unless `data` hold what every loss needs, in matching shapes."""
    rows, length = checked_tokens(data, vocab_size).shape
    if "sample_mask" not in data:
        raise BatchError(f"the data lack 'sample_mask' [B]; they have {sorted(data)}")
    for key, value in data.items():
        shape = _shape(key, value)
        if shape[0] != rows or (shape[1:2] and shape[1] != length):
            raise BatchError(
                f"{key!r} has shape {tuple(shape)}, but input_ids are [{rows}, {length}]: "
                "dimension 0 must be the batch and dimension 1, where there is one, the sequence"
            )


def _shape(key: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor) and value.ndim:
        return tuple(value.shape)
    if isinstance(value, list):
        return (len(value),)
    raise BatchError(
        f"{key!r} is a {type(value).__name__} without rows; every value must be a tensor or a list "
        "with one entry per row"
    )


def check_metrics(metrics: dict[str, Any]) -> None:
    """BatchError naming the metric unless all are numbers, which can be added up."""
    for name, value in metrics.items():
        if not isinstance(value, (bool, int, float)):
            raise BatchError(
                f"the loss returned the metric {name!r} as a {type(value).__name__}; metrics are "
                "numbers or tensors of one element"
            )
