"""Rows as verl's trainers make them: jagged text for SFT, rollouts in both layouts for PPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

VOCAB = 200
PAD = 1
"""The tokenizer's padding token, which fills dense rows."""
PROMPT, RESPONSE = 9, 14
"""Longest prompt and longest response of a row."""
LENGTHS = ((5, 14), (9, 3), (2, 9), (7, 11), (1, 6), (9, 14), (4, 2), (6, 8))
"""Tokens of each row's prompt and response."""


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as verl's rows have them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def part_of(rows: TensorDict, rank: int, size: int) -> TensorDict:
    """What verl hands to one of `size` data-parallel ranks."""
    return tu.chunk_tensordict(rows, size)[rank] if size > 1 else rows


def sft_rows(step: int) -> TensorDict:
    """A global batch of eight rows, of which all but the prompts count."""
    draw = torch.Generator().manual_seed(100 + step)
    ids, masks = [], []
    for prompt, response in LENGTHS:
        length = prompt + response
        ids.append(torch.randint(4, VOCAB, (length,), generator=draw))
        masks.append((torch.arange(length) >= prompt).long())
    rows = {
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(each)) for each in ids]),
        "loss_mask": jagged(masks),
    }
    settings = {
        "pad_mode": "no_padding",
        "pad_token_id": PAD,
        "global_batch_size": len(LENGTHS),
        "temperature": 1.0,
    }
    return tu.get_tensordict(rows, settings)


def _dense_rollouts(seed: int) -> dict[str, torch.Tensor]:
    """Prompts padded left, responses right, and what the trainer adds to them."""
    draw = torch.Generator().manual_seed(seed)
    count = len(LENGTHS)
    prompts, responses = torch.full((count, PROMPT), PAD), torch.full((count, RESPONSE), PAD)
    attention = torch.zeros(count, PROMPT + RESPONSE, dtype=torch.long)
    counts = torch.zeros(count, RESPONSE, dtype=torch.long)
    for row, (prompt, response) in enumerate(LENGTHS):
        prompts[row, PROMPT - prompt :] = torch.randint(4, VOCAB, (prompt,), generator=draw)
        responses[row, :response] = torch.randint(4, VOCAB, (response,), generator=draw)
        attention[row, PROMPT - prompt : PROMPT + response] = 1
        counts[row, :response] = 1
    # A tool's answer in the middle of a response does not count.
    counts[0, 4:7] = 0
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    noise = torch.randn(3, count, RESPONSE, generator=draw)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": positions,
        "response_mask": counts,
        # Small: rounding errors of a gradient's norm grow with it.
        "advantages": 0.2 * noise[0] * counts,
        "values": noise[1] * counts,
        "returns": noise[2] * counts,
    }


def rollouts(seed: int, layout: str, **settings: Any) -> TensorDict:
    """Eight rollouts in the layout of verl's trainer `v0` (dense, rows of text jagged) or `v1`
    (all jagged), with the trainer's settings.
    """
    dense = _dense_rollouts(seed)
    if layout == "v0":
        rows = left_right_2_no_padding(tu.get_tensordict(dense, {}))
    else:
        rows = tu.get_tensordict(_all_jagged(dense), {})
    tu.assign_non_tensor(rows, pad_mode="no_padding", pad_token_id=PAD, **settings)
    return rows


def _all_jagged(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    text = dense["attention_mask"].bool()
    prompts, answers = text[:, :PROMPT], text[:, PROMPT:]
    inside = {
        "prompts": prompts,
        "input_ids": text,
        "position_ids": text,
        **dict.fromkeys(("responses", "response_mask", "advantages", "values", "returns"), answers),
    }
    rows = {
        key: jagged([values[mask] for values, mask in zip(dense[key], masks, strict=True)])
        for key, masks in inside.items()
    }
    return rows | {"loss_mask": rows["response_mask"]}


def add_responses(rows: TensorDict, name: str, text: torch.Tensor) -> None:
    """Add what was read of the text, jagged with position t for token t + 1, as a column of
    responses, as the trainer does.
    """
    lengths = [length for _, length in LENGTHS][: len(rows)]
    ends = text.offsets()[1:].tolist()
    values = text.values()
    parts = [values[end - n - 1 : end - 1] for end, n in zip(ends, lengths, strict=True)]
    if rows["responses"].is_nested:
        rows[name] = jagged(parts)
    else:
        rows[name] = torch.stack(
            [torch.nn.functional.pad(part, (0, RESPONSE - len(part))) for part in parts]
        )
