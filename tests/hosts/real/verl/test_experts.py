"""The experts that verl's rows carry: which are replayed, and what is refused.

Shapes: B rows, S positions, j positions of a row, 3 layers, 2 of 4 experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from megatron_policy.errors import BatchError
from megatron_policy.hosts.verl.data import policy_batch
from megatron_policy.hosts.verl.experts import add_experts, jagged_experts, mode_of
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import LENGTHS, jagged, rollouts
from tests.hosts.real.verl.worker import in_its_own_job, made_worker, mine

TEXTS = [prompt + response for prompt, response in LENGTHS]


def experts_of(lengths: list[int], short: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.rand(n - short, 3, 4, generator=draw).argsort(-1)[..., :2] for n in lengths]
    return [row.short() for row in rows]


def with_experts(taken: list[torch.Tensor]) -> TensorDict:
    rows = rollouts(0, "v1")
    rows["routed_experts"] = jagged(taken)
    return rows


def added(rows: TensorDict, mode: str) -> torch.Tensor:
    """`[B, S, 3, 2]`."""
    batch = policy_batch(rows)
    add_experts(batch, rows, mode)
    found: torch.Tensor = batch["routed_experts"]
    return found


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int64])
@pytest.mark.parametrize("short", [0, 1])
def test_experts_of_rollouts_are_replayed_where_they_were_recorded(
    short: int, dtype: torch.dtype
) -> None:
    taken = [row.to(dtype) for row in experts_of(TEXTS, short)]
    taken[0][10:] = 0  # after the last generation
    found = added(with_experts(taken), "R3")
    assert found.shape == (8, max(TEXTS), 3, 2)
    for row, length in enumerate(TEXTS):
        known = 10 if row == 0 else length - 1
        assert torch.equal(found[row, :known].long(), taken[row][:known].long())
        assert (found[row, known:] == -1).all()


def test_experts_that_this_engine_has_recorded_are_replayed_for_all_tokens() -> None:
    taken = experts_of(TEXTS)
    found = added(with_experts(taken), "R2")
    for row, own in enumerate(taken):
        assert torch.equal(found[row, : len(own)], own)
        assert (found[row, len(own) :] == -1).all()
    again = jagged_experts(found, rollouts(0, "v1")["input_ids"])
    assert all(torch.equal(*pair) for pair in zip(again.unbind(), taken, strict=True))


def test_verl_says_which_rows_replay_nothing() -> None:
    rows = rollouts(0, "v1")
    assert mode_of(rows, "R2") == "R2" and mode_of(rows, "disabled") == "disabled"
    tu.assign_non_tensor(rows, enable_routing_replay=False)
    assert mode_of(rows, "R3") == "disabled"


def dense(rows: TensorDict) -> None:
    rows["routed_experts"] = torch.zeros(8, max(TEXTS), 3, 2, dtype=torch.int16)


def without_layers(rows: TensorDict) -> None:
    rows["routed_experts"] = jagged([row[:, 0] for row in experts_of(TEXTS)])


def of_floats(rows: TensorDict) -> None:
    rows["routed_experts"] = jagged([row.float() for row in experts_of(TEXTS)])


def cut(row: int, tokens: int) -> Callable[[TensorDict], None]:
    def change(rows: TensorDict) -> None:
        lengths = [n - tokens if number == row else n for number, n in enumerate(TEXTS)]
        rows["routed_experts"] = jagged(experts_of(lengths))

    return change


def unrecorded(rows: TensorDict) -> None:
    rows["routed_experts"] = jagged(
        [row * (number != 5) for number, row in enumerate(experts_of(TEXTS))]
    )


@pytest.mark.parametrize(
    ("mode", "change", "words"),
    [
        ("R2", lambda rows: None, "data lack 'routed_experts': compute_log_prob returns them"),
        ("R3", lambda rows: None, r"rollout\.enable_rollout_routing_replay=True"),
        ("R3", dense, r"are a Tensor \(8, 23, 3, 2\): pass 8 jagged rows of integers"),
        ("R2", without_layers, "pass 8 jagged rows of integers"),
        ("R3", of_floats, "are 8 rows of torch.float32"),
        ("R2", cut(3, 1), "has 17 tokens in row 3, whose text has 18: every token has a place$"),
        ("R3", cut(3, 2), "has 16 tokens in row 3, whose text has 18.*the last one can be left"),
        ("R3", cut(2, -1), "has 12 tokens in row 2, whose text has 11"),
        ("R3", unrecorded, "has no expert in row 5, whose tokens count in losses"),
    ],
)
def test_experts_of_another_form_are_refused(
    mode: str, change: Callable[[TensorDict], None], words: str
) -> None:
    rows = rollouts(0, "v1")
    change(rows)
    with pytest.raises(BatchError, match=words):
        added(rows, mode)


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_a_row_that_fills_a_batch_up_needs_no_experts(layout: str) -> None:
    rows = rollouts(0, layout)
    taken = experts_of(TEXTS)
    taken[5].zero_()
    rows["routed_experts"] = jagged(taken)
    counts = list(rows["loss_mask"].unbind())
    counts[5] = torch.zeros_like(counts[5])
    rows["loss_mask"] = jagged(counts) if layout == "v1" else torch.stack(counts)
    assert (added(rows, "R3")[5] == -1).all()


def replaying(mode: str, layout: str = "one", **overrides: Any) -> Case:
    return Case(
        layout=layout, packed=True, overrides={"engine.router_replay.mode": mode, **overrides}
    )


@in_its_own_job
def refusals(case: Case, model: Path) -> list[str]:
    """What a worker of every rank says to rows of which only the last rank's are wrong."""
    worker, said = made_worker(case, model), []
    right = experts_of(TEXTS)[7]
    outside = right.clone()
    outside[3, 0, 0] = 4
    for last in (right, right[2:], outside):
        taken = [*experts_of(TEXTS)[:7], last]
        rows = mine(worker, with_experts(taken))
        tu.assign_non_tensor(rows, compute_loss=False)
        try:
            worker.infer_batch(rows)
            said.append("")
        except BatchError as error:
            said.append(str(error))
    return said


def test_experts_that_are_wrong_on_one_rank_are_refused_on_all(
    verl_ranks: Any, checkpoint: Callable[..., Path]
) -> None:
    first, last = verl_ranks.run(2, refusals, replaying("R3", "dp2"), checkpoint("qwen3_moe"))
    assert first[0] == last[0] == ""
    assert "has 12 tokens in row 3, whose text has 14" in last[1]
    assert "has expert 4 in row 3, layer 1, at position 3" in last[2]
    assert all("another data-parallel rank" in said for said in first[1:])


@in_its_own_job
def read_with_adapters(case: Case, model: Path) -> list[set[str]]:
    """What a worker returns of rows without experts, with its adapters if they record, and without
    them.
    """
    worker = made_worker(case, model)
    found = []
    for without in (False, True) if worker.engine._translation.replay == "R2" else (True,):
        rows = mine(worker, rollouts(0, "v1", temperature=1.0))
        tu.assign_non_tensor(rows, compute_loss=False, no_lora_adapter=without)
        found.append(set(worker.infer_batch(rows).keys()) & {"log_probs", "routed_experts"})
    return found


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_model_without_its_adapters_chooses_its_own_experts(
    verl_ranks: Any, checkpoint: Callable[..., Path], mode: str
) -> None:
    adapters = {"rank": 2, "alpha": 4, "target_modules": ["linear_qkv"]}
    case = replaying(mode, **{"model.lora": adapters})
    (found,) = verl_ranks.run(1, read_with_adapters, case, checkpoint("qwen3_moe"))
    assert found[-1] == {"log_probs"}
    assert found[:-1] == ([{"log_probs", "routed_experts"}] if mode == "R2" else [])
