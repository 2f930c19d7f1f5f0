"""Rewards, advantages and returns of sampled answers.

Shapes: B rows, S positions. Position t of log-probabilities and rewards belongs to token t; the
value before that token, which the policy saw when it drew it, is that of position t - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(
    scores_B: Tensor, logprobs_BS: Tensor, reference_BS: Tensor, mask_BS: Tensor, kl_weight: float
) -> Tensor:
    """`[B, S]`: the score at each row's last token, minus the weighted difference to the
    reference's log-probability at every token.
    """
    rewards_BS = -kl_weight * (logprobs_BS - reference_BS) * mask_BS
    positions_S = torch.arange(mask_BS.size(1))
    last_B = (positions_S * (mask_BS > 0)).argmax(dim=1)
    return rewards_BS.index_put(
        (torch.arange(len(last_B)), last_B), scores_B.to(rewards_BS.dtype), accumulate=True
    )


def estimated(
    rewards_BS: Tensor, values_BS: Tensor, mask_BS: Tensor, discount: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[B, S]` of tokens, 0 where `mask_BS` is (Schulman et al. 2016,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation").
    """
    before_BS = torch.nn.functional.pad(values_BS[:, :-1], (1, 0))
    advantages_BS = torch.zeros_like(rewards_BS)
    following_B = torch.zeros(len(rewards_BS))
    for at in reversed(range(rewards_BS.size(1))):
        inside_B = mask_BS[:, at]
        further_B = mask_BS[:, at + 1] if at + 1 < mask_BS.size(1) else torch.zeros_like(inside_B)
        change_B = rewards_BS[:, at] + discount * values_BS[:, at] * further_B - before_BS[:, at]
        following_B = (change_B + discount * smoothing * following_B * further_B) * inside_B
        advantages_BS[:, at] = following_B
    return advantages_BS, (advantages_BS + before_BS) * mask_BS


def normalised(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """With mean 0 and standard deviation 1 where `mask_BS` is 1, and 0 elsewhere."""
    inside = values_BS[mask_BS > 0]
    return (values_BS - inside.mean()) / (inside.std() + 1e-6) * mask_BS
