"""The quickstart's losses against their formulas, written out for one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.quickstart.losses import GRPOLoss, ImitationLoss
from megatron_policy.batch import BatchedDataDict

ROWS, LENGTH, VOCAB = 6, 7, 11


def batch_of(seed: int = 0) -> BatchedDataDict:
    """Rows of which one does not count, and what GRPO reads, with garbage where nothing counts."""
    source = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=source)

    token_mask = (torch.rand(ROWS, LENGTH, generator=source) < 0.6).float()
    sample_mask = torch.ones(ROWS)
    sample_mask[2] = 0
    counts = token_mask * sample_mask.unsqueeze(-1) > 0
    logprobs = -normal(ROWS, LENGTH).abs()
    return BatchedDataDict(
        {
            "input_ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=source),
            "token_mask": token_mask,
            "sample_mask": sample_mask,
            "advantages": normal(ROWS, 1).expand(ROWS, LENGTH).clone(),
            "prev_logprobs": torch.where(counts, logprobs, torch.inf),
            "reference_policy_logprobs": torch.where(
                counts, logprobs + 0.3 * normal(ROWS, LENGTH), torch.nan
            ),
        }
    )


def counted(data: BatchedDataDict) -> list[tuple[int, int]]:
    """Row and position of every token that counts."""
    return [
        (row, position)
        for row in range(ROWS)
        for position in range(1, LENGTH)
        if data["sample_mask"][row] and data["token_mask"][row, position]
    ]


def logprobs_near(data: BatchedDataDict, spread: float = 0.5, seed: int = 5) -> Tensor:
    """Log-probabilities `[B, S - 1]` that differ from the earlier ones, to differentiate."""
    source = torch.Generator().manual_seed(seed)
    noise = spread * torch.randn(ROWS, LENGTH - 1, generator=source)
    prev = data["prev_logprobs"][:, 1:]
    return (torch.where(prev.isinf(), -1.0, prev) + noise).requires_grad_()


def call(loss: Any, data: BatchedDataDict, logprobs: Tensor, tokens: int | None = None) -> Any:
    count = torch.tensor(float(tokens or len(counted(data))))
    return loss(
        data=data,
        global_valid_seqs=data["sample_mask"].sum(),
        global_valid_toks=count,
        next_token_logprobs=logprobs,
    )


def test_the_imitation_loss_is_the_cross_entropy_of_the_tokens_that_count() -> None:
    data = batch_of()
    logits = torch.randn(ROWS, LENGTH, VOCAB, generator=torch.Generator().manual_seed(1))
    targets = data["input_ids"].clone()
    counts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row, position in counted(data):
        counts[row, position] = True
    targets[~counts] = -100
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    loss, metrics = call(ImitationLoss(), data, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics == {"loss": loss.item()}


def test_the_grpo_loss_is_its_formula_token_by_token() -> None:
    data, clip, weight = batch_of(), 0.2, 0.1
    logprobs = logprobs_near(data)
    total = kl_total = clipped = 0.0
    for row, position in counted(data):
        now = logprobs[row, position - 1].item()
        ratio = math.exp(now - data["prev_logprobs"][row, position].item())
        advantage = data["advantages"][row, position].item()
        limited = min(max(ratio, 1 - clip), 1 + clip)
        away = data["reference_policy_logprobs"][row, position].item() - now
        kl = math.exp(away) - away - 1
        total += -min(ratio * advantage, limited * advantage) + weight * kl
        kl_total += kl
        clipped += limited * advantage < ratio * advantage
    tokens = len(counted(data))
    loss, metrics = call(GRPOLoss(clip, weight), data, logprobs)
    assert loss.item() == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["kl"] == pytest.approx(kl_total / tokens, rel=1e-5)
    assert 0 < clipped < tokens
    assert metrics["clipped"] == pytest.approx(clipped / tokens)


def test_without_a_change_of_policy_the_grpo_gradient_is_that_of_the_policy_gradient() -> None:
    data = batch_of()
    logprobs = logprobs_near(data, spread=0.0)
    loss, metrics = call(GRPOLoss(clip=0.2, kl_weight=0.0), data, logprobs)
    loss.backward()
    expected = torch.zeros(ROWS, LENGTH - 1)
    for row, position in counted(data):
        expected[row, position - 1] = -data["advantages"][row, position] / len(counted(data))
    torch.testing.assert_close(logprobs.grad, expected)
    assert metrics["clipped"] == 0.0


def test_a_token_that_has_gone_far_enough_is_pushed_no_further() -> None:
    data = batch_of()
    prev = torch.where(data["prev_logprobs"].isinf(), -1.0, data["prev_logprobs"])[:, 1:]
    further = (prev + 0.5 * data["advantages"][:, 1:].sign()).requires_grad_()
    loss, metrics = call(GRPOLoss(clip=0.2, kl_weight=0.0), data, further)
    loss.backward()
    assert further.grad is not None and not further.grad.any()
    assert metrics["clipped"] == pytest.approx(1.0)


def test_the_kl_estimate_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    data = batch_of()
    data["reference_policy_logprobs"] = data["prev_logprobs"]
    at_reference = call(GRPOLoss(), data, logprobs_near(data, spread=0.0))[1]["kl"]
    assert at_reference == pytest.approx(0.0, abs=1e-7)
    for seed in range(3):
        assert call(GRPOLoss(), data, logprobs_near(data, seed=seed))[1]["kl"] > 1e-3


@pytest.mark.parametrize("loss", [ImitationLoss(), GRPOLoss()], ids=["imitation", "grpo"])
def test_losses_metrics_and_gradients_of_microbatches_add_up(loss: Any) -> None:
    data, tokens = batch_of(), len(counted(batch_of()))
    whole = logprobs_near(data)
    value, metrics = call(loss, data, whole)
    value.backward()
    assert whole.grad is not None and whole.grad.isfinite().all()

    parts = logprobs_near(data)
    results = [
        call(loss, part, rows, tokens)
        for part, rows in zip(data.make_microbatch_iterator(2), parts.split(2), strict=True)
    ]
    torch.stack([value for value, _ in results]).sum().backward()
    assert sum(value.item() for value, _ in results) == pytest.approx(value.item(), rel=1e-5)
    for name, expected in metrics.items():
        assert sum(part[name] for _, part in results) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(parts.grad, whole.grad)
