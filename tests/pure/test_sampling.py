"""Choosing tokens: what is cut, what is drawn, and which log-probability is told."""

from __future__ import annotations

import pytest
import torch

from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.sampling import Sampling, sample

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(count: int = 4000, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    logits = PROBABILITIES.log().expand(count, -1)
    return sample(logits, Sampling(max_new_tokens=1, **settings), torch.Generator().manual_seed(0))  # type: ignore[arg-type]


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=len(PROBABILITIES)) / len(tokens)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        ({"filters": Filters(top_k=2)}, torch.tensor([2 / 3, 1 / 3, 0, 0, 0])),
        ({"filters": Filters(top_k=9)}, PROBABILITIES),
        ({"filters": Filters(top_p=0.8)}, torch.tensor([0.5, 0.25, 0.15, 0, 0]) / 0.9),
        ({"filters": Filters(top_p=0.49)}, torch.tensor([1.0, 0, 0, 0, 0])),
        ({"filters": Filters(top_p=0.01)}, torch.tensor([1.0, 0, 0, 0, 0])),
        ({"filters": Filters(min_p=0.29)}, torch.tensor([0.5, 0.25, 0.15, 0, 0]) / 0.9),
    ],
)
def test_tokens_are_drawn_from_the_cut_and_scaled_distribution(settings, expected) -> None:
    seen = frequencies(draw(**settings)[0])
    # Three standard deviations of a frequency over 4000 draws are at most 0.024.
    torch.testing.assert_close(seen, expected, rtol=0, atol=0.025)
    assert (seen[expected == 0] == 0).all()


@pytest.mark.parametrize(
    "settings", [{"greedy": True}, {"temperature": 0.0}, {"filters": Filters(top_k=1)}]
)
def test_greedy_zero_temperature_and_one_candidate_take_the_likeliest(settings) -> None:
    assert (draw(**settings)[0] == 0).all()


@pytest.mark.parametrize("filtered", [True, False])
def test_the_logprob_told_is_of_what_is_kept_or_of_the_whole_at_the_temperature(
    filtered: bool,
) -> None:
    filters = Filters(top_k=2, top_p=0.99)
    tokens, logprobs = draw(filters=filters, temperature=0.5, filter_logprobs=filtered)
    shares = PROBABILITIES**2 * (torch.arange(5) < (2 if filtered else 5))
    torch.testing.assert_close(logprobs, (shares / shares.sum()).log()[tokens])
