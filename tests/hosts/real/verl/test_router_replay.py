"""verl's router replay in its actor worker, in several layouts: log-probabilities, then an update
of a model whose routers have been changed in between, as plain transformers computes it when its
routers are made to take the same experts.

Shapes: j positions of a row, L layers with experts, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from tests.exact import load_hf
from tests.expert_families import EXPERTS
from tests.hosts.real.verl.actor import EPOCHS, MINI_BATCH, made_worker, old_log_probs, update
from tests.hosts.real.verl.comparison import check_same
from tests.hosts.real.verl.configs import EPSILON, OPTIMIZER, Case, ppo_config
from tests.hosts.real.verl.rollouts import LENGTHS, add_responses, jagged, rollouts
from tests.hosts.real.verl.worker import (
    collected,
    exported,
    in_its_own_job,
    metrics_of,
    mine,
    of_responses,
    text_of,
)
from tests.router_oracle import forced, recording, routers

ENGINE = "actor_rollout_ref.actor.engine"
LAYERS, TEMPERATURE = 4, 0.7
"""The first layer is dense."""
EP2 = {f"{ENGINE}.expert_model_parallel_size": 2}
CASES = {
    "one": Case(packed=True),
    "pp2": Case(layout="pp2"),
    "vpp2": Case(layout="vpp2", packed=True),
    "tp2_sp": Case(layout="tp2_sp", packed=True, dynamic=True),
    "dp2": Case(layout="dp2", packed=True),
    "ep2": Case(layout="dp2", overrides=EP2),
}
Experts = Sequence[torch.Tensor]
"""Those of each row, `[j, L, K]`."""


def replaying(case: Case, mode: str) -> Case:
    overrides = {**case.overrides, f"{ENGINE}.router_replay.mode": mode}
    return Case(case.engine, case.layout, case.packed, case.dynamic, overrides=overrides)


def turned(routers_EH: Sequence[torch.Tensor]) -> None:
    """Give every expert the weights by which its neighbour was chosen."""
    with torch.no_grad():
        for weight_EH in routers_EH:
            weight_EH.copy_(weight_EH.roll(1, 0))


@in_its_own_job
def updated(case: Case, model: Path, given: Experts | None) -> dict[str, Any]:
    """Log-probabilities and an update, with the experts of a rollout if there are any."""
    worker = made_worker(case, model, "actor")
    engine = worker.actor.engine
    rows = rollouts(0, "v1", temperature=TEMPERATURE)
    if given is not None:
        rows["routed_experts"] = jagged(given)
    output = old_log_probs(worker, mine(worker.actor, rows))
    old = text_of(engine, output, "log_probs")
    if given is None:
        own = None if output is None else [row.numpy() for row in output["routed_experts"].unbind()]
        taken = [torch.from_numpy(row) for part in collected(engine, own) for row in part]
        rows["routed_experts"] = jagged(taken)
    else:
        assert output is None or "routed_experts" not in output.keys()  # noqa: SIM118
    for chunk in engine.policy._engine.pipeline.models:
        turned([each for name, each in chunk.named_parameters() if name.endswith("router.weight")])
    add_responses(rows, "old_log_probs", old)
    add_responses(rows, "ref_log_prob", old)
    metrics = metrics_of(engine, update(worker, mine(worker.actor, rows)))
    return {
        "taken": None if given else taken,
        "record": {
            "log_probs": of_responses(old),
            **{key: np.array([float(x) for x in metrics[key]]) for key in ("loss", "grad_norm")},
            **exported(engine),
        },
    }


@cache
def experts_of_a_rollout() -> Experts:
    """Two of four experts in all layers, as an inference engine returns them: zeros in the dense
    layer, for the last token, and in one row for what follows its last generation.
    """
    draw = torch.Generator().manual_seed(3)
    rows = []
    for number, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        taken_JLK = torch.rand(length, LAYERS, 4, generator=draw).argsort(-1)[..., :2].short()
        taken_JLK[:, 0] = 0
        taken_JLK[length - (4 if number == 0 else 1) :] = 0
        rows.append(taken_JLK)
    return rows


def of_layers_with_experts(taken: Experts) -> Experts:
    """-1 where nothing was recorded."""
    return [row[:, 1:].masked_fill((row[:, 1:] == 0).all(-1, keepdim=True), -1) for row in taken]


def scores(hf: PreTrainedModel, ids: torch.Tensor, taken_JLK: torch.Tensor | None) -> Any:
    """Log-probabilities and entropies of a row as verl has them: position t has token t + 1."""
    any_LK = (len(ids), LAYERS - 1, 2)
    taken_JLK = torch.full(any_LK, -1) if taken_JLK is None else taken_JLK
    with forced(hf, taken_JLK.unsqueeze(0)):
        all_JV = (hf(ids.unsqueeze(0)).logits[0] / TEMPERATURE).log_softmax(-1)
    own_J = all_JV[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    return torch.nn.functional.pad(own_J, (0, 1)), -(all_JV.exp() * all_JV).sum(-1)


def of_rows(hf: PreTrainedModel, rows: TensorDict, taken: Sequence[Any]) -> dict[str, torch.Tensor]:
    pairs = [scores(hf, *row) for row in zip(rows["input_ids"].unbind(), taken, strict=True)]
    return {"log_probs": jagged([a for a, _ in pairs]), "entropy": jagged([b for _, b in pairs])}


def updated_by_transformers(
    case: Case, model: Path, folder: Path, taken: Experts | None, replayed: bool = True
) -> dict[str, Any]:
    """The same by transformers with torch's Adam and verl's loss, one row at a time; with the
    experts of its own log-probabilities if none are given. `replayed` is false for an update in
    which routers choose anew.
    """
    hf, chosen = load_hf(model), []
    rows = rollouts(0, "v1", temperature=TEMPERATURE)
    with torch.no_grad(), recording(hf, chosen):
        old = of_rows(hf, rows, taken or [None] * len(LENGTHS))["log_probs"]
    layers = LAYERS - 1
    own = [torch.stack(chosen[i : i + layers], 1) for i in range(0, len(chosen), layers)]
    used = (taken or own) if replayed else [None] * len(LENGTHS)
    turned([router.weight for router in routers(hf)])
    add_responses(rows, "old_log_probs", old)
    add_responses(rows, "ref_log_prob", old)
    config = omega_conf_to_dataclass(ppo_config(case, model).actor_rollout_ref.actor)
    optimizer = torch.optim.Adam(hf.parameters(), lr=OPTIMIZER["lr"], eps=EPSILON)
    record: dict[str, Any] = {"log_probs": of_responses(old), "loss": [], "grad_norm": []}
    for batch in mini_batches(case) * EPOCHS:
        part = tu.index_select_tensor_dict(rows, list(batch))
        tokens = part["loss_mask"].values().sum().item()
        tu.assign_non_tensor(part, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(batch))
        found = of_rows(hf, part, [used[row] for row in batch])
        loss, _ = ppo_loss(config, model_output=found, data=part)
        optimizer.zero_grad()
        loss.backward()
        record["grad_norm"].append(torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0).item())
        record["loss"].append(loss.item())
        optimizer.step()
    hf.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    record |= {f"weights/{name}": each.numpy() for name, each in weights.items()}
    return {"taken": own, "record": {key: np.array(each) for key, each in record.items()}}


def mini_batches(case: Case) -> list[tuple[int, ...]]:
    """Rows of each step: every data-parallel rank takes as many of its own, in their order."""
    ranks = 2 if case.layout == "dp2" else 1
    own, each = MINI_BATCH // ranks, len(LENGTHS) // ranks
    return [
        tuple(rank * each + first + row for rank in range(ranks) for row in range(own))
        for first in range(0, each, own)
    ]


@pytest.fixture(scope="module")
def mixture(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_moe", layers=LAYERS, **EXPERTS["qwen3_moe"])


@pytest.mark.parametrize("name", CASES)
def test_r2_takes_the_experts_of_the_log_probabilities_again(
    verl_ranks: Any, mixture: Path, tmp_path: Path, name: str
) -> None:
    case = replaying(CASES[name], "R2")
    found = verl_ranks.run(case.world, updated, case, mixture, None)[0]
    wanted = updated_by_transformers(case, mixture, tmp_path, None)
    for own, theirs in zip(found["taken"], wanted["taken"], strict=True):
        assert torch.equal(own.sort(-1).values.long(), theirs.sort(-1).values)
    check_same(found["record"], wanted["record"])
    if name == "one":
        others = updated_by_transformers(case, mixture, tmp_path, None, replayed=False)
        for key in ("loss", "grad_norm"):
            assert abs(others["record"][key][0] - wanted["record"][key][0]) > 1e-3, key


@pytest.mark.parametrize("name", ["one", "pp2", "tp2_sp"])
def test_r3_takes_the_experts_of_the_rollout(
    verl_ranks: Any, mixture: Path, tmp_path: Path, name: str
) -> None:
    case, given = replaying(CASES[name], "R3"), experts_of_a_rollout()
    found = verl_ranks.run(case.world, updated, case, mixture, given)[0]
    wanted = updated_by_transformers(case, mixture, tmp_path, of_layers_with_experts(given))
    check_same(found["record"], wanted["record"])
