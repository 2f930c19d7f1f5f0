"""Checks of data and loss inputs, made before any rank computes with them.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import SAY_DRAWN, Architecture, Shell
from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError, ConfigError, LossError
from megatron_policy.interfaces import LossFunction, LossInputType
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.microbatch import count_patches, inside
from megatron_policy.training.media_checks import check_pictures
from megatron_policy.training.transformers_keys import (
    TYPES,
    check_labels,
    check_token_types,
    refuse_masked_pixels,
    refuse_unread_inputs,
    take_model_inputs,
)
from megatron_policy.training.value_checks import (
    check_kind,
    check_mask,
    check_temperature,
    shape_of,
    take_attachments,
)

PADDED = Batching("padded")


def check_batch(
    data: Any, vocab_size: int, attachments: Collection[str] = (), shell: Shell | None = None
) -> BatchedDataDict:
    """`data` copied into a new batch, with the plan it came with, its tokens and lengths int64, and
    the model's `attachments` as lists; BatchError naming the key that does not fit, or the row
    whose pictures do not, if the model has a `shell` that reads them. Lengths are also taken from
    `attention_mask`.
    """
    if not isinstance(data, Mapping):
        raise BatchError(f"data is a {type(data).__name__}; pass a BatchedDataDict")
    batch = BatchedDataDict(data)
    odd = [key for key in batch if not isinstance(key, str)]
    if odd:
        raise BatchError(f"the data have the key {odd[0]!r}; keys must be strings")
    refuse_unread_inputs(batch, attachments, shell)
    batch["input_ids"] = _token_ids(batch)
    rows = batch["input_ids"].size(0)
    if batch.get("input_lengths") is not None:
        batch["input_lengths"] = _lengths(batch, "which tell where rows end")
    for key, value in batch.items():
        shape = shape_of(key, value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            batch[key] = value.detach()  # the first microbatch would free the graph of the others
        if shape[0] != rows:
            raise BatchError(
                f"{key!r} has shape {shape}, but input_ids have {rows} rows, so that row "
                f"{min(shape[0], rows)} is in one of them only: dimension 0 must be the batch"
            )
    take_attachments(batch, attachments)
    refuse_masked_pixels(batch)
    take_model_inputs(batch)
    batch["input_ids"] = check_tokens(batch, vocab_size)
    check_temperature(batch)
    if shell is not None or TYPES & batch.keys():
        _check_masks(batch)
    if shell is not None:
        check_pictures(batch, shell)
    check_token_types(batch, shell)
    return batch


def check_tokens(data: BatchedDataDict, vocab_size: int) -> torch.Tensor:
    """`input_ids` int64 `[B, S]`; BatchError unless they are present and, before the rows' ends,
    within the vocabulary. What is not in it behind a row's end is replaced by 0: tokenizers pad
    with ids of their own.
    """
    tokens_BS = _token_ids(data)
    outside = (tokens_BS < 0) | (tokens_BS >= vocab_size)
    if not outside.any():
        return tokens_BS
    wrong = outside & inside(data) if "input_lengths" in data else outside
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"input_ids has token {tokens_BS[row, position]} in row {row} at position {position}, "
            f"but the model's vocabulary has {vocab_size} entries: is it this model's tokenizer? "
            "If it is padding, pass input_lengths, behind which any id may stand"
        )
    return tokens_BS.masked_fill(outside, 0)


def _token_ids(data: BatchedDataDict) -> torch.Tensor:
    """`input_ids` int64 `[B, S]`; BatchError unless they are present.

    Only data that carry a microbatch plan can have no rows: their rank has no share.
    """
    tokens_BS = data.get("input_ids")
    if not isinstance(tokens_BS, torch.Tensor):
        if "input_ids" not in data:
            raise BatchError(f"the data lack a tensor 'input_ids'; they have {sorted(data)}")
        raise BatchError(
            f"'input_ids' is a {type(tokens_BS).__name__}, not a tensor or an array [B, S]: a "
            "tokenizer returns one with padding=True, return_tensors='pt'"
        )
    check_kind("input_ids", tokens_BS)
    rows, width = tokens_BS.shape if tokens_BS.ndim == 2 else (0, 0)
    empty = not width or not (rows or data.micro_batch_indices)
    if empty or not holds_integers(tokens_BS.dtype):
        raise BatchError(
            f"input_ids are {tokens_BS.dtype} of shape {tuple(tokens_BS.shape)}; they must be "
            "integers [B, S] with at least one row and one position"
        )
    # A small dtype cannot represent the vocabulary size.
    return tokens_BS.long()


def check_prompts(
    data: BatchedDataDict,
    vocab_size: int,
    max_length: int,
    attachments: Collection[str] = (),
    shell: Shell | None = None,
) -> BatchedDataDict:
    """`input_ids` int64 `[B, S]`, `input_lengths` int64 `[B]` and the model's `attachments`, ready
    for generation.

    BatchError as `check_batch`, or naming the first row whose prompt is empty or leaves no room
    below `max_length` positions.
    """
    data = check_batch(data, vocab_size, attachments, shell)
    width = data["input_ids"].size(1)
    longest = min(width, max_length - 1)
    for row, length in enumerate(_lengths(data, "which tell where prompts end").tolist()):
        if not 1 <= length <= longest:
            raise BatchError(
                f"input_lengths has {length} in row {row}; a prompt's length must lie between 1 "
                f"and {longest} (input_ids are {width} wide, and by max_total_sequence_length and "
                f"the model's positions a text has at most {max_length} tokens)"
            )
    keys = ("input_ids", "input_lengths", *SAY_DRAWN, *attachments)
    return BatchedDataDict({key: data[key] for key in keys if key in data})


def check_lengths(data: BatchedDataDict, batching: Batching) -> list[int]:
    """The number of tokens of each row; the width of `input_ids` if rows are padded and there are
    no `input_lengths`.

    BatchError naming the row whose length is not between 1 and the width, or the row or group of
    rows that does not fit into a microbatch, and the key to change.
    """
    rows, width = data["input_ids"].shape
    if batching.kind == "padded" and "input_lengths" not in data:
        batching.check([width] * rows, width, count_patches(data))
        return [width] * rows
    lengths: list[int] = _lengths(data, f"which {batching.kind} microbatches go by").tolist()
    for row, length in enumerate(lengths):
        if not 1 <= length <= width:
            raise BatchError(
                f"input_lengths has {length} in row {row}; it must lie between 1 and {width}, the "
                "width of input_ids"
            )
    batching.check(lengths, width, count_patches(data))
    return lengths


def _lengths(data: BatchedDataDict, why: str) -> torch.Tensor:
    """`input_lengths` int64 `[B]`; BatchError unless they are integers, one per row."""
    lengths_B, rows = data.get("input_lengths"), data["input_ids"].size(0)
    if lengths_B is None:
        raise BatchError(f"the data lack a tensor 'input_lengths', {why}; they have {sorted(data)}")
    if not isinstance(lengths_B, torch.Tensor):
        kind = type(lengths_B).__name__
        raise BatchError(f"input_lengths are a {kind}; they must be a tensor of integers [{rows}]")
    check_kind("input_lengths", lengths_B)
    if lengths_B.shape != (rows,) or not holds_integers(lengths_B.dtype):
        raise BatchError(
            f"input_lengths are {lengths_B.dtype} of shape {tuple(lengths_B.shape)}; they must be "
            f"integers [{rows}], one for each row of input_ids"
        )
    return lengths_B.long()


def is_count(size: object) -> bool:
    """Whether this is an integer of at least 1 (bool does not count)."""
    return isinstance(size, Integral) and not isinstance(size, bool) and int(size) >= 1


def check_sizes(global_batch_size: int, micro_batch_size: int) -> None:
    """BatchError unless both are integers of at least 1."""
    check_size("gbs", global_batch_size)
    check_size("mbs", micro_batch_size)


def check_size(name: str, size: Any) -> None:
    """BatchError unless this is an integer of at least 1."""
    if not is_count(size):
        raise BatchError(f"{name} is {size!r}: pass a whole number, 1 or more")


def check_training_data(
    data: Any,
    vocab_size: int,
    batching: Batching = PADDED,
    attachments: Collection[str] = (),
    shell: Shell | None = None,
) -> BatchedDataDict:
    """Return `data` as `check_batch` does. BatchError naming key and row unless they hold what
    every loss needs, in matching shapes, and lengths and masks usable for making microbatches.
    """
    checked = check_batch(data, vocab_size, attachments, shell)
    rows, length = checked["input_ids"].shape
    if "sample_mask" not in checked:
        raise BatchError(
            "the data lack 'sample_mask' [B], 1 for each row that counts (torch.ones(B)); they "
            f"have {sorted(data)}"
        )
    for key, value in checked.items():
        shape = shape_of(key, value)
        if shape[1:2] and shape[1] != length:
            raise BatchError(
                f"{key!r} has shape {shape}, but input_ids are [{rows}, {length}], so that row 0 "
                f"has {shape[1]} entries for {length} tokens: dimension 0 must be the batch and "
                "dimension 1, if any, the sequence"
            )
    _check_masks(checked)
    lengths = check_lengths(checked, batching)
    if "token_mask" not in checked:
        return checked
    # No token beyond its row's length may count: it is not computed.
    mask_BS = checked["token_mask"] != 0
    ends_B = torch.tensor(lengths, device=mask_BS.device)
    beyond = torch.arange(length, device=mask_BS.device) >= ends_B.unsqueeze(1)
    counted = beyond & mask_BS & (checked["sample_mask"] != 0).to(mask_BS.device).unsqueeze(1)
    if counted.any():
        row, position = counted.nonzero()[0].tolist()
        raise BatchError(
            f"token_mask counts position {position} of row {row}, whose input_lengths is "
            f"{lengths[row]}: make the mask 0 beyond it, or the length larger"
        )
    return checked


def _check_masks(data: BatchedDataDict) -> None:
    rows, length = data["input_ids"].shape
    for key, wanted in (("sample_mask", (rows,)), ("token_mask", (rows, length))):
        if key in data:
            check_mask(key, data[key], wanted)


def check_head(architecture: Architecture, scalar: bool = False) -> None:
    """ConfigError unless the model's head is a scalar one or, by default, that of a language
    model.
    """
    if scalar and architecture.head is None:
        raise ConfigError(
            "this policy has no values: its head is that of a language model. Make it with "
            "policy.reward_model_cfg.enabled"
        )
    if architecture.head is not None and not scalar:
        raise ConfigError(
            "this policy has no vocabulary: its head gives one number for each token "
            "(policy.reward_model_cfg), so that it has values() and score() only"
        )


_NOT_FED = {
    "distillation": "to distil from a teacher's top-k, write a 'logprob' loss whose attribute "
    "`candidates` names the key of the teacher's indices in the data",
    "distillation_cross_tokenizer": "teachers with another tokenizer are not supported; distil "
    "from one with the same tokenizer",
    "draft": "training a draft model is not supported; set policy.draft.enabled to false",
}
"""Inputs of the host's losses that this policy does not provide, and what to do."""


def loss_kind(loss_fn: LossFunction) -> str | None:
    """The value of a loss's `input_type` (host from 0.6), or None without one (host up to 0.5).
    NotImplementedError for a host's `input_type` that this policy does not provide, LossError for
    one that nobody has.
    """
    if not hasattr(loss_fn, "input_type"):
        return None
    # A host brings its own enumeration: compare values, not members.
    kind = getattr(loss_fn.input_type, "value", loss_fn.input_type)
    said = f"{type(loss_fn).__name__}.input_type is {kind!r}"
    if isinstance(kind, str) and kind in _NOT_FED:
        raise NotImplementedError(f"{said}: {_NOT_FED[kind]}")
    if kind not in [known.value for known in LossInputType]:
        raise LossError(
            f"{said}, which is not an input of a loss: use one of LossInputType, that is 'logprob' "
            "or 'logit', and with a scalar head 'value', 'score' or 'logit'"
        )
    return str(kind)


def candidates_key(loss_fn: LossFunction) -> str | None:
    """The key of the vocabulary entries whose log-probabilities the loss asks for, or None."""
    key: str | None = getattr(loss_fn, "candidates", None)
    return key if loss_kind(loss_fn) == LossInputType.LOGPROB.value else None


def rows_per_group(loss_fn: LossFunction) -> int:
    """How many rows that follow each other the loss reads together, 1 if it does not say;
    LossError unless this is an integer of at least 1.
    """
    number: Any = getattr(loss_fn, "rows_per_group", 1)
    if not is_count(number):
        raise LossError(
            f"{type(loss_fn).__name__}.rows_per_group is {number!r}: make it the number of rows "
            "that the loss reads together, 2 for pairs"
        )
    return int(number)


def for_loss(batching: Batching, loss_fn: LossFunction) -> Batching:
    """`batching` that keeps together the rows that the loss reads together."""
    return replace(batching, rows_per_group=rows_per_group(loss_fn))


def check_loss_inputs(loss_fn: LossFunction, data: BatchedDataDict, vocab_size: int) -> None:
    """BatchError naming key and row unless `data`, which have passed `check_training_data`, also
    hold what this loss needs, and no labels that contradict it; for an `input_type` as `loss_kind`.
    """
    check_labels(data, reads_logprobs=loss_kind(loss_fn) == LossInputType.LOGPROB.value)
    key = candidates_key(loss_fn)
    if key is None:
        return
    name, wanted = type(loss_fn).__name__, tuple(data["input_ids"].shape)
    if key not in data:
        raise BatchError(
            f"{name}.candidates is {key!r}, but the data lack it; they have {sorted(data)}"
        )
    entries_BSK = data[key]
    if not isinstance(entries_BSK, torch.Tensor):
        raise BatchError(f"{key!r} is a {type(entries_BSK).__name__}; it must be a tensor")
    shape, dtype = tuple(entries_BSK.shape), entries_BSK.dtype
    if len(shape) != 3 or shape[:2] != wanted or not shape[2] or not holds_integers(dtype):
        raise BatchError(
            f"{key!r} is {dtype} of shape {shape}; {name}.candidates must be integers "
            f"[{wanted[0]}, {wanted[1]}, K]: K vocabulary entries for each token of input_ids"
        )
    entries_BSK = entries_BSK.long()  # a small dtype cannot represent the vocabulary size
    outside = (entries_BSK < 0) | (entries_BSK >= vocab_size)
    outside &= inside(data).to(outside.device).unsqueeze(-1)
    if outside.any():
        row, position, place = outside.nonzero()[0].tolist()
        raise BatchError(
            f"{key!r} has entry {entries_BSK[row, position, place]} in row {row} at position "
            f"{position}, but the model's vocabulary has {vocab_size} entries: does the teacher "
            "have another tokenizer?"
        )


def describe_wrong_metric(metrics: Mapping[Any, Any]) -> str:
    """Describe the first invalid metric of a loss; empty if all are numbers under string names, so
    that they can be added up.
    """
    for name, value in metrics.items():
        if not isinstance(name, str):
            return f"returned a metric under {name!r}: metrics have names"
        one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        if not one and not isinstance(value, (bool, int, float)):
            return (
                f"returned the metric {name!r} as a {type(value).__name__}; metrics are numbers or "
                "tensors of one element"
            )
    return ""
