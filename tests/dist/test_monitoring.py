"""What a policy tells whoever watches it, on ranks that each have a part of the numbers."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Mapping
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import yaml

from megatron_policy.config import PolicyConfig
from megatron_policy.monitoring import JsonlWriter
from megatron_policy.monitoring.summary import estimate_memory
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import LENGTH, VOCAB
from tests.losses import TokenNLL
from tests.site.blocks import blocks_of, page_text, set_up


class Failing:
    """A writer that fails at its second record."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if len(self.steps) == 2:
            raise OSError("the disk is full")

    def close(self) -> None:
        """Nothing is open."""


def watched(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two steps, a save, and a further step of a policy that is resumed."""
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    failing, results = Failing(), []
    with open_policy(config, writers=[failing, JsonlWriter(f"{folder}/own.jsonl")]) as policy:
        for step in range(2):
            part = data.get_batch(step, GLOBAL_BATCH)
            results.append(policy.train(own_share(policy, part), TokenNLL()))
        policy.write_metrics({"reward": torch.tensor(0.5)})
        policy.save_checkpoint(f"{folder}/saved", f"{folder}/saved")
        summary, report = policy.summary(), policy.report()
        expected = estimate_memory(policy.config, policy._engine, policy.topology)
    ended = policy.summary()
    resumed = {"weights_path": f"{folder}/saved", "optimizer_path": f"{folder}/saved"}
    with open_policy(config, **resumed) as policy:
        part = own_share(policy, data.get_batch(0, GLOBAL_BATCH))
        results.append(policy.train(part, TokenNLL()))
    return {
        "results": results,
        "steps of the failing writer": failing.steps,
        "summary": summary,
        "ended": ended,
        "report": report,
        "peak": None if expected is None else expected.peak,
    }


@pytest.mark.parametrize("megatron", [{}, {"tensor_model_parallel_size": 2}, {"dtensor_cfg": {}}])
def test_rank_0_records_what_all_ranks_have_and_goes_on_without_a_writer_that_fails(
    ranks, checkpoints, tmp_path, megatron: dict[str, Any]
) -> None:
    lines = tmp_path / "configured.jsonl"
    config = policy_config(checkpoints[True], megatron, metrics={"jsonl": str(lines)})
    first, second = ranks.run(2, watched, config, str(tmp_path))
    assert first["steps of the failing writer"] == [1, 2]
    assert second["steps of the failing writer"] == []
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["step"] for each in records] == [1, 2, 2, 2, 3]
    own = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    times = [each.pop("time") for each in [*records, *own]]
    assert own == records[:4] and all(times)
    assert records[2] == {"step": 2, "reward": 0.5} and records[3]["checkpoint/total_bytes"] > 0
    for record, result in zip([*records[:2], records[4]], first["results"], strict=True):
        assert record["step"] == result["step"]
        assert record["train/loss"] == result["loss"].item()
        assert record["loss/loss"] == pytest.approx(result["loss"].item(), rel=1e-5)
        assert record["speed/tokens"] == result["speed"]["tokens"]
    assert max(map(len, first["summary"].splitlines())) <= 80
    assert "shut down" not in first["summary"]
    assert first["ended"].splitlines()[0].split(None, 1) == [
        "state",
        "shut down: this is what it was; make a new policy",
    ]
    assert "2 ranks" in first["summary"] and str(checkpoints[True])[-20:] in first["summary"]
    report = first["report"]
    assert (report.step, report.speed.calls, report.ranks) == (2, 2, 1)
    for each in filter(lambda rank: rank["peak"] is not None, (first, second)):
        held = each["report"].memory
        assert held.parameters + held.gradients + held.optimizer <= each["peak"]
    assert report.memory.parameters > 0 and report.memory.reference_on_host > 0


def run_blocks(blocks: list[str], folder: str) -> None:
    """The page's blocks, one after another, as a script in `folder`."""
    level, handlers = logging.getLogger("megatron_policy").level, [*logging.root.handlers]
    try:
        with contextlib.chdir(folder):
            exec("\n".join(blocks), {})
    finally:
        logging.getLogger("megatron_policy").setLevel(level)
        logging.root.handlers[:] = handlers


def test_the_blocks_of_the_page_run_and_its_configuration_is_legal(
    ranks, checkpoints, tmp_path
) -> None:
    shown = [*blocks_of("docs/monitoring.md", page_text("docs/monitoring.md"))]
    blocks = [each.text for each in (*set_up(shown[0]), *shown)]
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen2.5-0.5B").symlink_to(checkpoints[True])
    ranks.run(1, run_blocks, blocks, str(tmp_path))
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in written.splitlines()]
    assert [("reward" in each, each["step"]) for each in records[:-1]] == [
        (own, step) for step in (1, 2, 3) for own in (False, True)
    ]
    assert 0 < records[-1]["eval/train_rollout_logprob_abs_diff"] < 0.03  # the page's noise
    page = page_text("docs/monitoring.md")
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    metrics = yaml.safe_load(written)["policy"]["metrics"]
    config = PolicyConfig.parse(policy_config("x", {}, metrics=metrics))
    assert config.metrics.wandb is not None and config.metrics.wandb.mode == "offline"


def listen_to_a_policy(config: dict[str, Any]) -> list[str]:
    """What is logged from level WARNING up."""
    kept = BufferingHandler(1000)
    kept.setLevel(logging.WARNING)
    logging.getLogger().addHandler(kept)
    try:
        with warnings.catch_warnings():
            # Else Python shows a warning of the same line once in a process.
            warnings.simplefilter("always", UserWarning)
            with open_policy(config, init_reference_model=False):
                return [record.getMessage() for record in kept.buffer]
    finally:
        logging.getLogger().removeHandler(kept)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_policy_that_is_built_once_more_warns_of_nothing(ranks, checkpoints, distributed) -> None:
    optimizer = {"optimizer": {"use_distributed_optimizer": distributed}}
    config = policy_config(checkpoints[True], optimizer)
    ranks.run(1, listen_to_a_policy, config)
    assert ranks.run(1, listen_to_a_policy, config) == [[]]
