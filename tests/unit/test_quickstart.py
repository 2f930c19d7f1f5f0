"""The quickstart without a policy: task, tokens, advantages, settings, pictures."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, Qwen2Config

from examples.quickstart.checkpoint import train_tokenizer
from examples.quickstart.codec import Codec
from examples.quickstart.demo import tokenizer_of
from examples.quickstart.display import Display, sparkline
from examples.quickstart.grpo import group_advantages
from examples.quickstart.plot import smoothed
from examples.quickstart.settings import GRPO, Imitation, Layout, Lengths, policy_section
from examples.quickstart.task import CARE, MISTAKES, Problem, Problems, reward
from examples.quickstart.verify import Comparison
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PROBLEM = Problem(("d", "b", "e", "a", "c"))


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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(p.prompt + p.answer for p in Problems(seed=0).held_out)


def test_a_checkpoint_without_a_tokenizer_is_refused_with_what_to_copy(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(Qwen2Config().to_json_string())
    with pytest.raises(ConfigError, match=r"has no tokenizer.*copy tokenizer\.json.*--model"):
        tokenizer_of(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_of(str(tmp_path)).eos_token == tokenizer.eos_token


def test_the_tokenizer_has_one_token_for_each_letter(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer(PROBLEM.prompt)["input_ids"]
    assert len(tokens) == 1 + 5 + 1
    assert tokenizer.decode(tokens) == PROBLEM.prompt
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_answers_are_learnt_from_their_first_token_and_read_back_without_the_prompt(
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
    codec, problems = Codec(tokenizer), [PROBLEM, Problem(("b", "a", "a", "a", "a"))]
    texts = [PROBLEM.answer, " b"]
    whole = codec.demonstrations(problems, texts)
    generated = BatchedDataDict(
        {"output_ids": whole["input_ids"], "unpadded_sequence_lengths": whole["input_lengths"]}
    )
    assert codec.answers(generated, codec.prompts(problems)["input_lengths"]) == texts
    assert codec.lengths(problems) == Lengths(prompt=7, answer=6)


def test_advantages_have_mean_zero_and_deviation_one_in_every_group_that_differs() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    groups = group_advantages(rewards, 4).view(-1, 4)
    assert groups[0].tolist() == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], abs=1e-5)
    for group in groups[:2]:
        assert group.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert group.pow(2).mean().sqrt().item() == pytest.approx(1.0, abs=1e-5)
    assert not groups[2:].any()


LAYOUTS = ((Layout(2, 2), 1), (Layout(2, 1), 2), (Layout(4, 2), 2))
"""Workers and tensor-parallel ranks of each, and how many replicas that makes."""


@pytest.mark.parametrize("phase", [Imitation(), GRPO()], ids=["sft", "grpo"])
def test_the_policy_section_is_a_valid_one_whose_batches_divide(phase: Imitation | GRPO) -> None:
    for layout, replicas in LAYOUTS:
        section = policy_section("m", phase, 60, layout, Lengths(7, 6), width=128, seed=3)
        config = PolicyConfig.parse(section)
        assert topology_of(config, layout.workers).dp == replicas
        share = config.train_global_batch_size // replicas
        assert share % config.train_micro_batch_size == 0
        assert config.max_total_sequence_length >= 7 + 6
        assert config.megatron_cfg.optimizer.lr == phase.learning_rate
    assert (GRPO().problems * GRPO().group_size) % GRPO().batch_size == 0


def test_wider_models_take_smaller_steps_and_narrower_ones_no_larger_steps() -> None:
    def rate(width: int) -> float:
        section = policy_section("m", Imitation(), 60, Layout(), Lengths(7, 6), width, seed=0)
        return section["megatron_cfg"]["optimizer"]["lr"]

    assert rate(64) == rate(128) == Imitation().learning_rate
    assert rate(256) == pytest.approx(rate(128) / 4)


def test_an_export_passes_when_it_is_within_the_tolerance() -> None:
    for difference, passed in ((1e-5, True), (1e-3, False), (math.nan, False)):
        assert Comparison(difference, tolerance=1e-4).passed is passed


def test_a_sparkline_rises_with_its_values_and_smoothing_lags_behind_a_step() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5]) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([float(x // 50) for x in range(100)], width=4) == "▁▁██"
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert 0.0 < smoothed([0.0, 1.0])[1] < 1.0


def test_a_line_of_progress_fits_80_columns() -> None:
    written = StringIO()
    names = ("reward", "loss", "kl", "clipped", "grad_norm", "held_out_reward")
    with Display(Console(file=written)).phase("GRPO", 120, "reward") as show:
        show({"step": 120} | dict.fromkeys(names, -0.25))
    line = written.getvalue().rstrip("\n")
    assert len(line) <= 80 and line.endswith("held out -0.250")


@pytest.mark.parametrize("example", ["quickstart", "shapes"])
def test_without_matplotlib_an_example_ends_with_one_line_that_names_the_extra(
    tmp_path: Path, example: str
) -> None:
    run = REPOSITORY / "examples" / example / "run.py"
    code = (
        "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = ['run.py', '--steps', '1']"
        f"; sys.path.insert(0, {str(run.parent)!r}); "
        f"runpy.run_path({str(run)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert 'error: matplotlib is not installed: in the checkout, pip install ".[demo]"' in " ".join(
        done.stdout.split()
    )
