"""Checks an exported policy against transformers, which is independent of how it was trained.

Shapes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_policy import BatchedDataDict, Policy

# Exports in half precision are the policy's fp32 weights, rounded.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}
PICTURES = ("pixel_values", "image_grid_thw")


@dataclass(frozen=True)
class Comparison:
    """The largest absolute difference between two log-probabilities of a token, and the
    tolerance.
    """

    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the two agree; NaN never agrees."""
        return self.difference <= self.tolerance


@torch.no_grad()
def compare(policy: Policy, exported: Path, batch: BatchedDataDict) -> Comparison:
    """Compare the policy's log-probabilities of `batch` with those of its exported checkpoint."""
    pictures = [key for key in PICTURES if key in batch]
    auto = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    model = auto.from_pretrained(exported, dtype="auto")
    tolerance = TOLERANCES[model.dtype]
    seen: dict[str, Tensor] = {}
    if pictures:
        places_BS = batch["input_ids"] == model.config.image_token_id
        # Transformers would take a placeholder that the policy has drawn for a picture.
        drawn_B = (places_BS & (batch["token_mask"] > 0)).any(1)
        batch = batch.select_indices((~drawn_B).nonzero().flatten())
        seen = {key: torch.cat(batch[key]) for key in pictures}
        seen["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).int()
    tokens_BS, lengths_B = batch["input_ids"], batch["input_lengths"]
    logprobs_BSV = model.float().eval()(tokens_BS, **seen).logits[:, :-1].log_softmax(-1)
    expected_BS = logprobs_BSV.gather(-1, tokens_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    found_BS = policy.get_logprobs(batch)["logprobs"][:, 1:]
    inside_BS = torch.arange(1, tokens_BS.size(1)) < lengths_B.unsqueeze(1)
    return Comparison((found_BS - expected_BS)[inside_BS].abs().max().item(), tolerance)
