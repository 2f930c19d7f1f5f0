"""Keys of a batch that users of transformers pass: what would change a result is used or refused.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Shell
from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import counted, inside

IGNORED_LABEL = -100
"""What transformers leaves out of a loss."""

_FROM_THE_START = "every row is computed from its first token on"
_REFUSED = {
    "inputs_embeds": "a model embeds input_ids itself",
    "past_key_values": _FROM_THE_START,
    "cache_position": _FROM_THE_START,
    "audio_feature_lengths": "feature_attention_mask says how long clips are",
    "use_audio_in_video": "sound is read as clips of its own, not between the frames of a video",
    "decoder_input_ids": "models have no encoder here",
    "encoder_hidden_states": "models have no encoder here",
    "head_mask": "no head of attention is left out here",
    "shift_labels": "the tokens that a loss counts are those of token_mask",
}
TYPES = {"mm_token_type_ids", "token_type_ids"}
"""Keys with the kind of each token."""
_MEDIA = (
    *("pixel_values", "image_grid_thw", "image_grid_hw", "image_sizes", "batch_num_images"),
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"),
    *("input_features", "feature_attention_mask", "input_features_mask"),
    *("imgs_sizes", "pixel_values_flat", "sound_clips", "sound_length", "multi_modal_inputs"),
)
"""Keys of processors and hosts with what towers read, or with what says how it is to be read."""


def refuse_unread_inputs(
    batch: BatchedDataDict, attachments: Collection[str] = (), shell: Shell | None = None
) -> None:
    """BatchError for an input of transformers' models that no model reads here, unless it is one of
    this model's `attachments`, which are none where its `shell` is not used.
    """
    media = f"this model reads {', '.join(attachments)} beside text"
    if not attachments:
        media = "this model reads text alone"
        media += "" if shell is None else " while it is trained to predict further tokens (MTP)"
    beside = _MEDIA if attachments else (*_MEDIA, "pixel_attention_mask")
    for key, why in (_REFUSED | dict.fromkeys(beside, media)).items():
        if key in batch and key not in attachments:
            raise BatchError(f"the data have {key!r}, which is not read: {why}. Leave it out")


def refuse_masked_pixels(batch: BatchedDataDict) -> None:
    """BatchError, naming the row, for a `pixel_attention_mask` that leaves out pixels."""
    for row, mask in enumerate(batch.get("pixel_attention_mask", ())):
        if isinstance(mask, torch.Tensor) and not mask.all():
            raise BatchError(
                f"pixel_attention_mask leaves out pixels of row {row}: all pixels of pictures are "
                "read. Pass the pictures without padding, and without those that fill a row up"
            )


def take_model_inputs(batch: BatchedDataDict) -> None:
    """Take `input_lengths` from a right-padded `attention_mask`, and types of tokens as int64.
    BatchError, naming the row, for any other mask, one that contradicts `input_lengths`, and for
    `position_ids` that a model would not compute with.

    The rows of `batch` are those of its checked `input_ids`.
    """
    if "attention_mask" in batch:
        lengths_B = _lengths_of_mask(batch)
        given_B: torch.Tensor = batch.get("input_lengths", lengths_B)
        if (found := _first(lengths_B != given_B.to(lengths_B.device))) is not None:
            (row,) = found
            raise BatchError(
                f"attention_mask has {lengths_B[row]} tokens in row {row}, whose input_lengths is "
                f"{given_B[row]}: make both agree, or leave one of them out"
            )
        batch["input_lengths"] = lengths_B
    for key in TYPES & batch.keys():
        batch[key] = _of_tokens(batch, key)
    text_BS = inside(batch)
    if "position_ids" in batch:
        positions_BS = _of_tokens(batch, "position_ids")
        usual_S = torch.arange(text_BS.size(1), device=positions_BS.device)
        if (found := _first((positions_BS != usual_S) & text_BS)) is not None:
            raise BatchError(
                f"position_ids has {positions_BS[found]} in row {found[0]} at position {found[1]}: "
                "tokens are numbered from 0 in each row, whatever this key says. Leave it out, and "
                "give each sequence a row of its own, right padded (sequence_packing joins them)"
            )


def check_token_types(batch: BatchedDataDict, shell: Shell | None) -> None:
    """BatchError, naming the row, for `mm_token_type_ids` other than those that the `shell` finds,
    and for `token_type_ids` other than these where tokens of a picture see each other, or 0 in
    other models. Some processors give what stands around tiles or rows of a picture its type too.
    Rows that do not count are not compared.
    """
    seeing = shell if shell is not None and shell.both_ways else None
    tokens_BS = batch["input_ids"]
    for key, finds in (("mm_token_type_ids", shell), ("token_type_ids", seeing)):
        if key not in batch:
            continue
        types_BS, compared_BS = batch[key], inside(batch)
        wanted_BS = finds.find_types(batch, compared_BS) if finds else torch.zeros_like(types_BS)
        wrong_BS = types_BS != wanted_BS
        for number, medium in enumerate(finds.media if finds else (), start=1):
            around_BS = (tokens_BS != medium.placeholder) & (types_BS == number)
            around_BS &= (wanted_BS == number).any(1, keepdim=True) & (wanted_BS == 0)
            wrong_BS &= ~around_BS | (not medium.joined)
        if "sample_mask" in batch:
            compared_BS = compared_BS & (batch["sample_mask"] != 0).unsqueeze(-1)
        if (found := _first(wrong_BS & compared_BS)) is not None:
            raise BatchError(
                f"{key} has {types_BS[found]} in row {found[0]} at position {found[1]}, where "
                f"token {tokens_BS[found]} makes it {wanted_BS[found]}: pass the model's "
                "processor's, or leave the key out"
            )


def check_labels(batch: BatchedDataDict, reads_logprobs: bool) -> None:
    """BatchError, naming the row, for integer `labels` `[B, S]` that leave out a token that counts
    or, with a loss that `reads_logprobs`, name another token than `input_ids`. Labels of other
    shapes are the loss's own.
    """
    labels, tokens_BS = batch.get("labels"), batch["input_ids"]
    if not isinstance(labels, torch.Tensor) or labels.shape != tokens_BS.shape:
        return
    if not holds_integers(labels.dtype):
        return
    labels_BS = labels.long().to(tokens_BS.device)
    counted_BS = counted(batch).to(tokens_BS.device)
    counted_BS[:, 0] = False  # predicts nothing
    left_out_BS = labels_BS == IGNORED_LABEL
    if (found := _first(left_out_BS & counted_BS)) is not None:
        raise BatchError(
            f"labels leave out position {found[1]} of row {found[0]} ({IGNORED_LABEL}), which "
            "counts here: labels are not read. Say which tokens count in token_mask, for example "
            f"token_mask=(labels != {IGNORED_LABEL})"
        )
    if not reads_logprobs:
        return
    if (found := _first((labels_BS != tokens_BS) & counted_BS)) is not None:
        raise BatchError(
            f"labels have {labels_BS[found]} in row {found[0]} at position {found[1]}, where "
            f"input_ids have {tokens_BS[found]}: log-probabilities are those of input_ids, and "
            "labels are not read. Leave the key out, or give it another name if the loss reads it"
        )


def _lengths_of_mask(batch: BatchedDataDict) -> torch.Tensor:
    """Int64 `[B]`: the tokens of each row by a right-padded `attention_mask`."""
    mask_BS = _of_tokens(batch, "attention_mask", others=(torch.bool, *_FLOATS))
    if (found := _first((mask_BS != 0) & (mask_BS != 1))) is not None:
        raise BatchError(
            f"attention_mask has {mask_BS[found]} in row {found[0]} at position {found[1]}: it is "
            "1 for tokens and 0 for padding"
        )
    mask_BS = mask_BS != 0
    lengths_B: torch.Tensor = mask_BS.sum(1)
    positions_S = torch.arange(mask_BS.size(1), device=mask_BS.device)
    wrong_BS = ~mask_BS & (positions_S < lengths_B.unsqueeze(1))
    if (found := _first(wrong_BS)) is not None:
        raise BatchError(
            f"attention_mask leaves out position {found[1]} of row {found[0]}, although tokens "
            "follow it: rows are right padded here. Set tokenizer.padding_side = 'right' and "
            "tokenize again, or move each row's tokens to its start"
        )
    if (found := _first(lengths_B == 0)) is not None:
        raise BatchError(
            f"attention_mask leaves out all of row {found[0]}: leave the row out, or keep one "
            "token of it and set its sample_mask to 0"
        )
    return lengths_B


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _of_tokens(
    batch: BatchedDataDict, key: str, others: tuple[torch.dtype, ...] = ()
) -> torch.Tensor:
    """The value of a key that has an integer, or one of `others`, for each token, on the device of
    `input_ids`; BatchError unless it is one.
    """
    value: Any = batch[key]
    tokens_BS = batch["input_ids"]
    kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    legal = isinstance(kind, torch.dtype) and (holds_integers(kind) or kind in others)
    if not legal or shape != tokens_BS.shape:
        raise BatchError(
            f"{key!r} is {kind} of shape {shape}: pass one number for each token, "
            f"{list(tokens_BS.shape)}, or leave the key out"
        )
    found: torch.Tensor = value.to(tokens_BS.device)
    # Unsigned dtypes lack some comparisons.
    return found.long() if holds_integers(found.dtype) else found


def _first(wrong: torch.Tensor) -> tuple[int, ...] | None:
    """The place of the first True; None without one."""
    return tuple(wrong.nonzero()[0].tolist()) if wrong.any() else None
