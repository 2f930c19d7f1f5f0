"""A teacher's candidates, which verl asks an engine for besides sampled tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.exact import load_hf
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import jagged, rollouts
from tests.hosts.real.verl.worker import in_its_own_job, made_worker, mine
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
        rows[name] = jagged([values[row, :length] for row, length in enumerate(lengths)])
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

    def texts(values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]

    given = torch.cat(texts(logits)).unsqueeze(0), jagged(texts(teacher)), jagged(texts(entries))
    wanted = compute_forward_kl_topk(*given, settings, "thd")
    ends = rows["input_ids"].offsets()[1:].tolist()
    responses = rows["responses"].offsets().diff().tolist()
    for key in ("distillation_losses", "student_mass", "teacher_mass"):
        ours, theirs = found[key].values(), wanted[key][0]
        for end, length in zip(ends, responses, strict=True):
            span = slice(end - length - 1, end - 1)
            check(f"verl: {key}", (ours[span] - theirs[span]).abs().max().item(), 1e-5)
    assert wanted["distillation_losses"].abs().max() > 0.1
