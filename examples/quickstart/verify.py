"""Checks an exported policy against transformers, which is independent of how it was trained.

Shapes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_policy import BatchedDataDict, Policy

# Exports in half precision are the policy's fp32 weights, rounded.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}


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
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    tolerance = TOLERANCES[model.dtype]
    tokens_BS, lengths_B = batch["input_ids"], batch["input_lengths"]
    logprobs_BSV = model.float().eval()(tokens_BS).logits[:, :-1].log_softmax(-1)
    expected_BS = logprobs_BSV.gather(-1, tokens_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    found_BS = policy.get_logprobs(batch)["logprobs"][:, 1:]
    inside_BS = torch.arange(1, tokens_BS.size(1)) < lengths_B.unsqueeze(1)
    return Comparison((found_BS - expected_BS)[inside_BS].abs().max().item(), tolerance)
