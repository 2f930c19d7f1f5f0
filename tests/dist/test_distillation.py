"""A student learns from the top-k of a teacher what one process of Hugging Face transformers and
torch learns, by the loss of the document.

Shapes: B rows, S positions, K candidates, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, learned_weights, open_policy, own_steps, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LENGTH, VOCAB, Layout, layout
from tests.dist.test_docs import python_blocks
from tests.dist.test_layouts import shards_of
from tests.losses import loss_mask

TEACHER, STUDENT = False, True  # the untied checkpoint and the tied one
CANDIDATES = 5
KEY = "teacher_topk_indices"
BUDGET = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}
PACKED = {"sequence_packing": BUDGET}
DYNAMIC = {"dynamic_batching": BUDGET | {"sequence_length_round": 2}}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one process, padded": (layout(1), {}),
    "TP2, packed": (layout(2, tp=2), PACKED),
    "CP2, packed": (layout(2, context_parallel_size=2), PACKED),
    "PP2, dynamic": (layout(2, pp=2), DYNAMIC),
    "FSDP2 x 2, dynamic": (FSDP2_LAYOUTS["FSDP2 x 2"], DYNAMIC),
    "FSDP2 CP2, packed": (FSDP2_LAYOUTS["FSDP2 CP2"], PACKED),
}


def loss_of_the_document() -> Any:
    made: dict[str, Any] = {}
    exec(python_blocks("docs/losses.md")[1], made)
    return made["TopKDistillation"]()


def taught(config: dict[str, Any], data: BatchedDataDict) -> BatchedDataDict:
    """The data with the teacher's top-k, read under `config`."""
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        logits_BSK, indices_BSK = policy.topk_logits(data, CANDIDATES)
    more = {"teacher_topk_logits": logits_BSK, KEY: indices_BSK}
    return BatchedDataDict(dict(data) | more)


@pytest.fixture(scope="module")
def lesson(ranks, checkpoints) -> BatchedDataDict:
    """Rows with the top-k of a teacher whose vocabulary is split between ranks."""
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    config = policy_config(checkpoints[TEACHER], layout(2, tp=2).megatron)
    return ranks.run(2, taught, config, data)[0]


def divergence(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    """KL divergence of the student from the teacher's distribution over its candidates."""
    logprobs_BSV = model(data["input_ids"]).logits.float().log_softmax(-1)[:, :-1]
    teacher_BSV = torch.zeros_like(logprobs_BSV).scatter(
        -1, data[KEY][:, :-1], data["teacher_topk_logits"][:, :-1].to(logprobs_BSV).softmax(-1)
    )
    each_BS = torch.nn.functional.kl_div(logprobs_BSV, teacher_BSV, reduction="none").sum(-1)
    mask_BS = loss_mask(data)
    return (each_BS * mask_BS).sum() / mask_BS.sum()


@pytest.fixture(scope="module")
def expected(lesson, checkpoints) -> oracle.Learned:
    # Rows are right padded: where there is no text the mask is 0, so repeats there do no harm.
    return oracle.Learned.of(checkpoints[STUDENT], lesson, GLOBAL_BATCH, divergence)


def study(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    loss = loss_of_the_document()
    with open_policy(config, init_reference_model=False) as policy:
        evaluated = policy.train(own_steps(policy, data)[0], loss, eval_mode=True, mbs=2)
        steps = [policy.train(step, loss, mbs=2) for step in own_steps(policy, data)]
        return {
            "tp": policy.coords.tp,
            "evaluated": evaluated["loss"],
            "steps": steps,
            "weights": learned_weights(policy),
        }


@pytest.mark.parametrize("name", CASES)
def test_a_student_learns_what_one_process_of_torch_learns(
    ranks, checkpoints, lesson, expected, name: str
) -> None:
    case, batching = CASES[name]
    path: Path = checkpoints[STUDENT]
    config = policy_config(path, case.megatron, **batching)
    for seen in ranks.run(case.world, study, config, lesson):
        expected.assert_same_steps(seen["steps"])
        expected.assert_same_loss(seen["evaluated"], 0)
        names = list(seen["weights"])
        for weight, shard in shards_of(path, expected.exact.weights, case.tp, seen["tp"], names):
            expected.assert_same_weight(seen["weights"][weight], shard, weight)
