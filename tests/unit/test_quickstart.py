"""The quickstart without a policy: task, tokens, advantages, losses, settings, pictures."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from examples.quickstart.checkpoint import train_tokenizer
from examples.quickstart.codec import Codec, with_masks
from examples.quickstart.display import sparkline
from examples.quickstart.grpo import group_advantages
from examples.quickstart.losses import GRPOLoss, ImitationLoss
from examples.quickstart.plot import smoothed
from examples.quickstart.settings import GRPO, Imitation, Layout, Lengths, policy_section
from examples.quickstart.task import CARE, MISTAKES, Problem, Problems, reward
from examples.quickstart.verify import Comparison
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.layout import topology_of

ROWS, LENGTH, VOCAB = 6, 7, 11
PROBLEM = Problem(("d", "b", "e", "a", "c"))


# -- task ----------------------------------------------------------------------------------------


def test_only_the_letters_in_order_and_nothing_else_are_rewarded() -> None:
    assert PROBLEM.prompt == "sort d b e a c ="
    assert reward(PROBLEM, " a b c d e") == reward(PROBLEM, "a b  c d e ") == 1.0
    for wrong in ("", " a b c d", " a b c d e e", " a b c e d", " a b c d e =", "abcde"):
        assert reward(PROBLEM, wrong) == 0.0


def test_every_kind_of_mistake_gives_wrong_answers_of_the_right_length() -> None:
    source = random.Random(0)
    for mistake in MISTAKES:
        answers = {mistake(PROBLEM, source) for _ in range(50)}
        assert any(reward(PROBLEM, answer) == 0.0 for answer in answers)
        assert all(len(answer.split()) == 5 for answer in answers)


def test_about_one_demonstration_in_four_is_right() -> None:
    problems = Problems(seed=1)
    drawn = problems.draw(4000)
    right = sum(reward(p, problems.demonstrate(p)) for p in drawn) / len(drawn)
    assert CARE < right < 0.35


def test_training_problems_are_never_held_out_and_held_out_ones_are_the_same_for_all_seeds() -> (
    None
):
    problems, others = Problems(seed=0), Problems(seed=1)
    assert problems.held_out == others.held_out
    assert len(set(problems.held_out)) == len(problems.held_out)
    # There are 100 000 problems: 256 of them at random would not be missed by this many draws.
    assert not set(problems.draw(100_000)) & set(problems.held_out)


def test_a_seed_decides_the_problems_and_their_demonstrations() -> None:
    def shown(seed: int) -> list[tuple[str, str]]:
        problems = Problems(seed)
        return [(p.prompt, problems.demonstrate(p)) for p in problems.draw(20)]

    assert shown(3) == shown(3) != shown(4)


# -- tokens --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(p.prompt + p.answer for p in Problems(seed=0).held_out)


def test_the_tokenizer_has_one_token_for_each_letter(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer(PROBLEM.prompt)["input_ids"]
    assert len(tokens) == 1 + 5 + 1
    assert tokenizer.decode(tokens) == PROBLEM.prompt
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_demonstrations_are_learnt_from_the_answers_first_token_to_their_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    batch = Codec(tokenizer).demonstrations([PROBLEM, PROBLEM], [PROBLEM.answer, " a b"])
    assert batch["input_lengths"].tolist() == [7 + 6, 7 + 3]
    assert batch["sample_mask"].tolist() == [1.0, 1.0]
    assert batch["token_mask"].tolist() == [
        [0.0] * 7 + [1.0] * 6,
        [0.0] * 7 + [1.0] * 3 + [0.0] * 3,
    ]
    learnt = batch["input_ids"][1][batch["token_mask"][1] > 0]
    assert tokenizer.decode(learnt) == f" a b{tokenizer.eos_token}"
    assert set(batch["input_ids"][1, 10:].tolist()) == {tokenizer.pad_token_id}


def test_generated_tokens_come_back_as_the_text_after_the_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    codec = Codec(tokenizer)
    problems = [PROBLEM, Problem(("b", "a", "a", "a", "a"))]
    texts = [PROBLEM.answer, " b"]
    whole = codec.demonstrations(problems, texts)
    generated = BatchedDataDict(
        {
            "output_ids": whole["input_ids"],
            "unpadded_sequence_lengths": whole["input_lengths"],
        }
    )
    assert codec.answers(generated, codec.prompts(problems)["input_lengths"]) == texts
    assert codec.lengths(problems) == Lengths(prompt=7, answer=6)


def test_masks_begin_where_each_prompt_ends() -> None:
    batch = BatchedDataDict(
        {"input_ids": torch.zeros(2, 4).long(), "input_lengths": torch.tensor([4, 3])}
    )
    masked = with_masks(batch, torch.tensor([1, 2]))
    assert masked["token_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 0]]
    assert "token_mask" not in batch


# -- advantages ----------------------------------------------------------------------------------


def test_advantages_have_mean_zero_and_deviation_one_in_every_group_that_differs() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    groups = group_advantages(rewards, 4).view(-1, 4)
    assert groups[0].tolist() == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], abs=1e-5)
    for group in groups[:2]:
        assert group.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert group.pow(2).mean().sqrt().item() == pytest.approx(1.0, abs=1e-5)


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    assert not group_advantages(torch.tensor([1.0, 1, 1, 0, 0, 0]), 3).any()


# -- losses --------------------------------------------------------------------------------------


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


# -- settings, comparison, pictures --------------------------------------------------------------


def layouts() -> Iterator[tuple[Layout, int]]:
    yield Layout(workers=2, tensor_parallel=2), 1
    yield Layout(workers=2, tensor_parallel=1), 2
    yield Layout(workers=4, tensor_parallel=2), 2


@pytest.mark.parametrize(("layout", "replicas"), layouts())
@pytest.mark.parametrize("phase", [Imitation(), GRPO()], ids=["sft", "grpo"])
def test_the_policy_section_is_a_valid_one_whose_batches_divide(
    layout: Layout, replicas: int, phase: Imitation | GRPO
) -> None:
    section = policy_section("m", phase, 60, layout, Lengths(7, 6), width=128, seed=3)
    config = PolicyConfig.parse(section)
    assert topology_of(config, layout.workers).dp == replicas
    share = config.train_global_batch_size // replicas
    assert share % config.train_micro_batch_size == 0
    assert (GRPO().problems * GRPO().group_size) % GRPO().batch_size == 0
    assert config.max_total_sequence_length >= 7 + 6
    assert config.megatron_cfg.optimizer.lr == phase.learning_rate


def test_wider_models_take_smaller_steps_and_narrower_ones_no_larger_steps() -> None:
    def rate(width: int) -> float:
        section = policy_section("m", Imitation(), 60, Layout(), Lengths(7, 6), width, seed=0)
        return section["megatron_cfg"]["optimizer"]["lr"]

    assert rate(64) == rate(128) == Imitation().learning_rate
    assert rate(256) == pytest.approx(rate(128) / 4)


@pytest.mark.parametrize(("difference", "passed"), [(1e-5, True), (1e-3, False), (math.nan, False)])
def test_an_export_passes_when_it_is_within_the_tolerance(difference: float, passed: bool) -> None:
    assert Comparison(difference, tolerance=1e-4).passed is passed


def test_a_sparkline_rises_with_its_values_and_keeps_its_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5]) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([float(x // 50) for x in range(100)], width=4) == "▁▁██"


def test_smoothing_keeps_a_constant_and_lags_behind_a_step() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert 0.0 < smoothed([0.0, 1.0])[1] < 1.0
