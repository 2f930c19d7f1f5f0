"""The two losses, as the policy's workers call them.

Each is called once per microbatch with the log-probabilities of its tokens, and divides by the
valid tokens of the whole global batch, so that the policy can sum the results over microbatches and
ranks. Shapes: B rows, S positions; position t of `next_token_logprobs` is for token t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_policy import LossInputType, LossType

Batch = Mapping[str, Tensor]
Result = tuple[Tensor, dict[str, float]]


def valid_tokens(data: Batch) -> Tensor:
    """1 where a token counts, `[B, S - 1]`; nothing predicts the first token."""
    return data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)


@dataclass(frozen=True)
class ImitationLoss:
    """Negative log-likelihood of the demonstrated tokens."""

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.LOGPROB

    def __call__(
        self,
        data: Batch,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> Result:
        loss = -(next_token_logprobs * valid_tokens(data)).sum() / global_valid_toks
        return loss, {"loss": loss.item()}


@dataclass(frozen=True)
class GRPOLoss:
    """Clipped policy gradient with a penalty for leaving the reference (Shao et al. 2024).

    Reads `[B, S]` tensors of `data`: `advantages`; `prev_logprobs`, of the policy that sampled the
    tokens; `reference_policy_logprobs`. The penalty is Schulman's k3 estimator of the KL divergence
    (2020), which is never negative and has low variance: exp(d) - d - 1, where d is the reference's
    log-probability minus the policy's.
    """

    clip: float = 0.2
    kl_weight: float = 0.02
    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.LOGPROB

    def __call__(
        self,
        data: Batch,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> Result:
        mask = valid_tokens(data)
        advantages = data["advantages"][:, 1:]
        # Masked positions can hold anything; made equal, they cannot overflow in exp.
        prev = torch.where(mask > 0, data["prev_logprobs"][:, 1:], next_token_logprobs.detach())
        reference = torch.where(
            mask > 0, data["reference_policy_logprobs"][:, 1:], next_token_logprobs.detach()
        )

        ratio = (next_token_logprobs - prev).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        distance = reference - next_token_logprobs
        kl = distance.exp() - distance - 1

        def mean(values: Tensor) -> Tensor:
            return (values * mask).sum() / global_valid_toks

        loss = mean(self.kl_weight * kl - gain)
        # A token is clipped if the limit stops its gradient.
        held_back = (clipped * advantages < ratio * advantages).to(ratio.dtype)
        return loss, {
            "loss": loss.item(),
            "kl": mean(kl).item(),
            "clipped": mean(held_back).item(),
        }
