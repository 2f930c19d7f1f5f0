"""Experts that verl's rows carry: which calls take them again, and what is refused.

Shapes: B rows, S positions of the longest, j positions of a row, L layers, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from megatron_policy.batch import BatchedDataDict
from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError
from megatron_policy.hosts.verl.data import has_losses, offsets_of
from megatron_policy.packing.microbatch import ROUTED_EXPERTS
from megatron_policy.training.replay import NOT_RECORDED

R2, R3 = "R2", "R3"
"""verl's modes: experts of log-probabilities are taken again in training, or those of rollouts."""
DISABLED = "disabled"
_ABSENT = {
    R2: "compute_log_prob returns them, and the trainer leaves that call out with "
    "algorithm.rollout_correction.bypass_mode=True: set it to False, or engine.router_replay.mode "
    "to 'disabled'",
    R3: "rollouts record them with actor_rollout_ref.rollout.enable_rollout_routing_replay=True: "
    "set it, or engine.router_replay.mode to 'disabled'",
}


def mode_of(data: TensorDict, mode: str) -> str:
    """The engine's mode for these rows: verl says that a reference replays nothing."""
    return mode if tu.get_non_tensor_data(data, "enable_routing_replay", True) else DISABLED


def add_experts(batch: BatchedDataDict, data: TensorDict, mode: str) -> None:
    """Add the experts that tokens took before, `[B, S, L, K]`; NOT_RECORDED where there are none.
    BatchError for data without them, for rows of other lengths, and with R3 for a row with tokens
    that count and no expert.

    A rollout records none for the last token of a row, which it has not computed, nor for what
    follows its last generation: verl fills these with zeros.
    """
    taken = data.get(ROUTED_EXPERTS, None)
    if taken is None:
        raise BatchError(
            f"engine.router_replay.mode is {mode!r}, but the data lack {ROUTED_EXPERTS!r}: "
            f"{_ABSENT[mode]}"
        )
    width, lengths = batch["input_ids"].size(1), batch["input_lengths"].tolist()
    rows = _rows(taken, lengths, mode)
    if mode == R3:
        for number, length in enumerate(lengths):
            # As the rollout recorded them, and NOT_RECORDED elsewhere.
            row_JLK = rows[number] = rows[number].clone()
            row_JLK[length - 1 :] = NOT_RECORDED
            if row_JLK.size(-1) > 1:  # else 0 is an expert that a token can have taken alone
                row_JLK[(row_JLK == 0).all(-1)] = NOT_RECORDED
        _check_recorded(rows, data)
    batch[ROUTED_EXPERTS] = torch.stack(
        [F.pad(row, (0, 0, 0, 0, 0, width - len(row)), value=NOT_RECORDED) for row in rows]
    )


def _rows(taken: Any, lengths: list[int], mode: str) -> list[torch.Tensor]:
    """The experts of each row, `[j, L, K]` in host memory; BatchError for another form."""
    form = f"{len(lengths)} jagged rows of integers [tokens, layers, experts of a token]"
    if not isinstance(taken, torch.Tensor) or not taken.is_nested or taken.dim() != 4:
        shape = tuple(taken.shape) if hasattr(taken, "shape") else ()
        raise BatchError(
            f"verl's {ROUTED_EXPERTS!r} are a {type(taken).__name__} {shape}: pass {form}, as "
            "verl's workers make them"
        )
    rows = [row.cpu() for row in taken.unbind()]
    if len(rows) != len(lengths) or not holds_integers(taken.dtype):
        raise BatchError(f"verl's {ROUTED_EXPERTS!r} are {len(rows)} rows of {taken.dtype}: {form}")
    short = 1 if mode == R3 else 0
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if not length - short <= len(row) <= length:
            raise BatchError(
                f"{ROUTED_EXPERTS!r} has {len(row)} tokens in row {number}, whose text has "
                f"{length}: every token has a place"
                + (", and the last one can be left out" if short else "")
            )
    # NOT_RECORDED is negative.
    return [row.short() if row.dtype is torch.uint8 else row for row in rows]


def _check_recorded(rows: list[torch.Tensor], data: TensorDict) -> None:
    """BatchError for a row without experts whose tokens count: verl's rows that fill a batch up
    have none that do.
    """
    if not has_losses(data):
        return
    mask: Any = data["loss_mask"]
    for number, (row, counted) in enumerate(zip(rows, mask.unbind(), strict=True)):
        if counted.any() and (row == NOT_RECORDED).all():
            raise BatchError(
                f"{ROUTED_EXPERTS!r} has no expert in row {number}, whose tokens count in losses: "
                "the rollout has recorded none for it. Leave the row out, or set its loss_mask to 0"
            )


def jagged_experts(taken_BSLK: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The experts of a microbatch's tokens as jagged rows `[B, j, L, K]`, int16 as verl's own."""
    lengths = offsets_of(like).diff().tolist()
    rows = [row[:length].short() for row, length in zip(taken_BSLK.cpu(), lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
