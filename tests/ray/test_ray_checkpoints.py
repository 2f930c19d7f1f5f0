"""Checkpoints through the driver, as a host calls it: its arguments, its directories, its order of
calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy import Policy, errors
from megatron_policy.errors import CheckpointError, ConfigError, WorkerError
from megatron_policy.workers import RayVirtualCluster
from megatron_policy.workers.cluster.failure import OWN, find_own_error
from tests.losses import TokenNLL
from tests.ray.policies import GBS, TOKENIZER, TP2, batch, config_of

ASYNC = {"checkpoint": {"async_save": True, "ckpt_assume_constant_structure": True}}
HOSTS = SimpleNamespace(enabled=True, save_period=10)  # its section on checkpoints


def policy_of(config: dict[str, Any], **kwargs: Any) -> Policy:
    return Policy(RayVirtualCluster([2], use_gpus=False), config, TOKENIZER, **kwargs)


def train(policy: Policy, seed: int) -> tuple[float, float]:
    result = policy.train(batch(seed, rows=GBS), TokenNLL())
    return float(result["loss"]), float(result["grad_norm"])


def save(policy: Policy, tmp_path: Path, step: str, **more: Any) -> Path:
    """As the host does: into a directory that gets its name when all is in it."""
    temporary = tmp_path / f"tmp_{step}"
    reported = policy.save_checkpoint(
        weights_path=str(temporary / "policy" / "weights"),
        optimizer_path=str(temporary / "policy" / "optimizer"),
        tokenizer_path=str(temporary / "policy" / "tokenizer"),
        checkpointing_cfg=HOSTS,
        **more,
    )
    report = policy.finalize_async_save() or reported
    assert report is not None and report.total_bytes > 0 and report.bytes_per_second > 0
    return temporary.rename(tmp_path / step) / "policy"


def refuse_and_go_on(policy: Policy, tmp_path: Path, without_optimizer: Path) -> None:
    """What cannot be is told in the worker's words, and every worker lives on."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("mine")
    policy.save_checkpoint(in_the_way / "weights")
    with pytest.raises(CheckpointError, match=f"{in_the_way}.*Not a directory") as failure:
        policy.finalize_async_save()
    assert isinstance(failure.value.__cause__, WorkerError)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'nowhere'} does not exist"):
        policy.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="fresh_optimizer"):
        policy.load_checkpoint(without_optimizer)
    for call in (policy.save_checkpoint, partial(policy.worker_group.run_all, "save_checkpoint")):
        with pytest.raises(ConfigError, match="save_checkpoint has no argument is_async"):
            call(weights_path=str(tmp_path / "unused"), is_async=True)
    assert not (tmp_path / "unused").exists()


def check_told(policy: Policy, lines: Path) -> None:
    """What the driver has recorded of both policies, and says of the second, whose step is 3."""
    policy.write_metrics({"reward": 0.5})
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["step"] for each in records if "loss/loss" in each] == [1, 2, 3, 2, 3, 4]
    assert [each["step"] for each in records if "checkpoint/seconds" in each] == [1, 3]
    assert (records[-1]["step"], records[-1]["reward"]) == (3, 0.5)
    report = policy.report()
    assert (report.step, report.ranks) == (3, 2)
    assert report.speed is not None and report.speed.calls == 3
    assert report.memory.parameters >= report.memory_least.parameters > 0
    assert "2 ranks = tp 2 x cp 1 x dp 1 x pp 1" in policy.summary()


def test_a_policy_goes_on_in_other_workers_from_what_it_saved(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config, data = config_of(checkpoint, TP2 | ASYNC), batch(rows=2)
    config["metrics"] = {"jsonl": str(tmp_path / "metrics.jsonl")}
    policy = policy_of(config)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert policy.get_load_report() is None
    train(policy, 0)
    saved = save(policy, tmp_path, "step_1", host_data={"consumed_samples": GBS})
    scores = policy.get_logprobs(data)["logprobs"]
    weights, optimizer = tmp_path / "weights", tmp_path / "optimizer"
    expected = []
    for seed in (1, 2):
        expected.append(train(policy, seed))
        policy.save_checkpoint(weights, optimizer if seed == 2 else None)
    assert policy.shutdown(), "and with it the save under way is complete"
    for name in ("weights", "optimizer"):
        (found,) = (saved / name).glob("iter_*")
        assert found.is_dir() and found.name == "iter_0000001"
    assert any((saved / "tokenizer").iterdir())
    assert len([*weights.glob("iter_*")]) == 2 and len([*optimizer.glob("iter_*")]) == 1

    policy = policy_of(
        config, weights_path=saved / "weights", optimizer_path=str(saved / "optimizer")
    )
    report = policy.get_load_report()
    assert report is not None and report.step == 1 and not report.not_restored
    assert report.host_data == {"consumed_samples": GBS}
    assert torch.equal(policy.get_logprobs(data)["logprobs"], scores)
    again = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(again, reference)
    refuse_and_go_on(policy, tmp_path, weights / "iter_0000002")
    assert [train(policy, seed) for seed in (1, 2)] == expected
    last = policy.get_logprobs(data)["logprobs"]
    train(policy, 3)
    assert policy.load_checkpoint(str(weights), optimizer).step == 3
    assert torch.equal(policy.get_logprobs(data)["logprobs"], last)
    check_told(policy, tmp_path / "metrics.jsonl")
    policy.save_checkpoint(tmp_path / "file" / "weights")
    with pytest.raises(CheckpointError, match="Not a directory"):
        policy.shutdown()
    assert policy.shutdown()


@pytest.mark.parametrize("kind", OWN)
def test_an_error_of_our_own_is_recognised_in_what_is_left_of_a_constructor(
    kind: type[Exception],
) -> None:
    text = (
        f"Traceback (most recent call last):\n  ...\n{kind.__module__}.{kind.__name__}: its words"
    )
    found = find_own_error(text)
    if kind.__module__ == errors.__name__:
        assert type(found) is kind and str(found) == "its words"
    else:
        assert found is None
