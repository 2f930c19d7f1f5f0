"""The arithmetic of the PPO example."""

from __future__ import annotations

import torch

from examples.ppo.advantages import estimated, normalised, token_rewards
from examples.ppo.losses import PreferenceLoss, ValueLoss

MASK_BS = torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 0]])


def test_rewards_are_at_the_last_token_and_differences_to_the_reference_everywhere() -> None:
    logprobs_BS = torch.tensor([[9.0, -1, -2, -3], [9, 9, -1, 9]])
    reference_BS = torch.tensor([[0.0, -2, -2, -1], [0, 0, -3, 0]])
    found = token_rewards(torch.tensor([5.0, -5]), logprobs_BS, reference_BS, MASK_BS, 0.5)
    expected = torch.tensor([[0.0, -0.5, 0, 1 + 5], [0, 0, -1 - 5, 0]])
    torch.testing.assert_close(found, expected)


def test_advantages_are_sums_of_discounted_changes_of_value() -> None:
    torch.manual_seed(0)
    rewards_BS, values_BS = torch.randn(2, 4) * MASK_BS, torch.randn(2, 4)
    discount, smoothing = 0.9, 0.7
    advantages_BS, returns_BS = estimated(rewards_BS, values_BS, MASK_BS, discount, smoothing)
    for row, inside in enumerate(([1, 2, 3], [2])):
        changes = {
            at: float(rewards_BS[row, at])
            + discount * float(values_BS[row, at]) * (at + 1 in inside)
            - float(values_BS[row, at - 1])
            for at in inside
        }
        for at in range(4):
            later = [
                (discount * smoothing) ** (other - at) * changes[other]
                for other in inside
                if other >= at and at in inside
            ]
            assert abs(float(advantages_BS[row, at]) - sum(later)) < 1e-6
            own = sum(later) + float(values_BS[row, at - 1]) if later else 0.0
            assert abs(float(returns_BS[row, at]) - own) < 1e-6


def test_normalised_values_have_mean_zero_and_deviation_one_inside() -> None:
    values_BS = torch.tensor([[7.0, 1, 2, 3], [7, 7, 6, 7]])
    found = normalised(values_BS, MASK_BS)
    inside = found[MASK_BS > 0]
    assert abs(float(inside.mean())) < 1e-6 and abs(float(inside.std()) - 1) < 1e-5
    assert not found[MASK_BS == 0].any()


def test_losses_are_those_of_their_papers() -> None:
    count = torch.tensor(4.0)
    scores = torch.tensor([2.0, 1, 0, 3])
    loss, _ = PreferenceLoss()({}, count, count, scores)
    torch.testing.assert_close(loss, (torch.log1p(torch.exp(torch.tensor([-1.0, 3]))).sum() / 2))
    data = {"returns": torch.ones(2, 4), "value_mask": MASK_BS}
    loss, _ = ValueLoss()(data, count, count, torch.full((2, 4), 3.0))
    assert float(loss) == 0.5 * 4 * 4 / 4
