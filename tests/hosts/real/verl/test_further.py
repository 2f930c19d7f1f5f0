"""What verl asks of an engine besides losses of sampled tokens: a teacher's candidates,
checkpoints, and that errors end a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from megatron_policy.errors import CheckpointError, ConfigError, LossError
from tests.exact import load_hf
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import rollouts, sft_rows
from tests.hosts.real.verl.worker import (
    exported,
    in_its_own_job,
    made_worker,
    metrics_of,
    mine,
    trained_steps,
)
from tests.margins import check

CANDIDATES = 5


def outputs_of_a_loss(worker: Any, rows: Any, keywords: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the engine hands to a loss, row by row in the rows' order."""
    seen: dict[str, torch.Tensor] = {}

    def loss(model_output: dict[str, Any], data: Any, dp_group: Any, **_: Any) -> Any:
        seen.update({key: each.detach() for key, each in model_output.items()})
        return model_output["log_probs"].values().sum() * 0.0, {}

    engine = worker.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(rows, functools.partial(loss, **keywords))
    return seen


@in_its_own_job
def distil(case: Case, model: Path, teacher: Any, entries: Any) -> dict[str, torch.Tensor]:
    worker = made_worker(case, model)
    rows = mine(worker, rollouts(3, "v1", temperature=0.7))
    lengths = rows["input_ids"].offsets().diff().tolist()
    for name, values in (("teacher_logprobs", teacher), ("teacher_ids", entries)):
        parts = [values[row, :length] for row, length in enumerate(lengths)]
        rows[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    tu.assign_non_tensor(
        rows,
        distillation_use_topk=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(lengths),
        global_batch_size=len(lengths),
    )
    settings = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=-4.0))
    return outputs_of_a_loss(worker, rows, {"distillation_config": settings})


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "cp2"])
def test_a_teachers_candidates_give_the_divergence_of_verls_own_loss(
    run: Callable[..., Any], qwen2: Path, layout: str
) -> None:
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    rows = rollouts(3, "v1", temperature=0.7)
    ids, lengths = rows["input_ids"].to_padded_tensor(0), rows["input_ids"].offsets().diff()
    draw = torch.Generator().manual_seed(5)
    entries = torch.randint(0, 200, (*ids.shape, CANDIDATES), generator=draw)
    teacher = torch.randn(*ids.shape, CANDIDATES, generator=draw).sub(2.0).log_softmax(-1) - 0.3
    found = run(distil, Case(layout=layout, packed=True), teacher, entries)
    with torch.no_grad():
        logits = load_hf(qwen2)(ids).logits.float() / 0.7
    settings = SimpleNamespace(
        distillation_loss=SimpleNamespace(log_prob_min_clamp=-4.0, use_chunked_topk=False)
    )

    def jagged(values: torch.Tensor) -> torch.Tensor:
        parts = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    wanted = compute_forward_kl_topk(
        torch.cat([row[:n] for row, n in zip(logits, lengths.tolist(), strict=True)]).unsqueeze(0),
        jagged(teacher),
        jagged(entries),
        settings,
        "thd",
    )
    ends = rows["input_ids"].offsets()[1:].tolist()
    responses = rows["responses"].offsets().diff().tolist()
    for key in ("distillation_losses", "student_mass", "teacher_mass"):
        ours, theirs = found[key].values(), wanted[key][0]
        for end, length in zip(ends, responses, strict=True):
            span = slice(end - length - 1, end - 1)
            check(f"verl: {key}", (ours[span] - theirs[span]).abs().max().item(), 1e-5)
    assert wanted["distillation_losses"].abs().max() > 0.1


@in_its_own_job
def save_and_go_on(case: Case, model: Path, folder: str) -> dict[str, Any]:
    """Save after a step, go on, and go on again from what was saved."""
    worker = made_worker(case, model)
    trained_steps(worker, range(1))
    for step in range(1, 4):
        worker.save_checkpoint(f"{folder}/global_step_{step}/actor", None, step, 2)
    ahead = trained_steps(worker, range(1, 3)) | exported(worker.engine)
    worker.load_checkpoint(f"{folder}/global_step_3/actor", None, False)
    again = trained_steps(worker, range(1, 3)) | exported(worker.engine)
    worker.load_checkpoint(None, None, False)
    with pytest.raises(CheckpointError, match="has no folder 'weights'"):
        worker.load_checkpoint(f"{folder}/global_step_1/actor", None, False)
    with pytest.raises(ConfigError, match=r"trainer\.default_hdfs_dir"):
        worker.save_checkpoint(f"{folder}/global_step_9", "hdfs://x", 9, None)
    return {key: (ahead[key], again[key]) for key in ahead}


@pytest.mark.parametrize("layout", ["tp2_sp", "dp2"])
def test_what_is_saved_goes_on_to_the_last_bit_and_the_oldest_goes(
    verl_ranks: Any, qwen2: Path, tmp_path: Path, layout: str
) -> None:
    contents = ["model", "optimizer", "extra", "hf_model"]
    case = Case(layout=layout, overrides={"checkpoint.save_contents": contents})
    for found in verl_ranks.run(case.world, save_and_go_on, case, qwen2, str(tmp_path)):
        for key, (ahead, again) in found.items():
            assert (ahead == again).all(), key
    kept = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/actor/weights"))
    assert kept == [f"global_step_{step}/actor/weights" for step in (2, 3)]
    load_hf(tmp_path / "global_step_3" / "actor" / "huggingface")


@in_its_own_job
def failing(case: Case, model: Path) -> tuple[float, float]:
    """A loss that raises on one rank is a LossError on all, and the engine goes on."""
    worker = made_worker(case, model)
    engine = worker.engine
    before = float(metrics_of(engine, worker.infer_batch(mine(worker, sft_rows(0))))["loss"])
    loss = worker.loss_fn

    def raises(**_: Any) -> Any:
        raise ArithmeticError("a loss of the user's")

    worker.set_loss_fn(raises)
    with pytest.raises(LossError, match="a loss of the user's"):
        worker.train_batch(mine(worker, sft_rows(0)))
    worker.set_loss_fn(loss)
    after = float(metrics_of(engine, worker.infer_batch(mine(worker, sft_rows(0))))["loss"])
    return before, after


@pytest.mark.parametrize("layout", ["one", "pp2", "dp2"])
def test_a_loss_that_raises_ends_the_call_on_every_rank_and_changes_nothing(
    verl_ranks: Any, qwen2: Path, layout: str
) -> None:
    case = Case(layout=layout)
    for before, after in verl_ranks.run(case.world, failing, case, qwen2):
        assert before == after


def refused(case: Case, model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        made_worker(case, model)
    return str(caught.value)


def test_a_key_that_is_not_supported_is_refused_before_anything_is_built(
    verl_ranks: Any, qwen2: Path
) -> None:
    case = Case(overrides={"engine.qat.enable": True})
    (said,) = verl_ranks.run(1, refused, case, qwen2)
    assert said.startswith("engine.qat.enable=True would change results")
