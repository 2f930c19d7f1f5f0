"""A student learns from the top-k of a teacher what one process of Hugging Face transformers and
torch learns, by the loss of the document; and a policy whose filters of sampling apply to
log-probabilities reads and learns what they do with whole logits.

Shapes: B rows, S positions, K candidates, V vocabulary.
"""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.lm_head.filters import Filters
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, learned_weights, open_policy, own_steps, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, FSDP2_TENSOR_LAYOUTS, LENGTH, VOCAB, Layout, layout
from tests.dist.shortcuts import UNUSED, answer, dynamic, packed
from tests.dist.test_docs import python_blocks
from tests.dist.test_layouts import assert_same_shards
from tests.exact import Exact, assert_equal
from tests.losses import loss_mask
from tests.unit.test_filters import plain_kept

TEACHER, STUDENT = False, True  # the untied checkpoint and the tied one
CANDIDATES = 5
KEY = "teacher_topk_indices"
DYNAMIC = dynamic(sequence_length_round=2)
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one process, padded": (layout(1), {}),
    "TP2, packed": (layout(2, tp=2), packed()),
    "CP2, packed": (layout(2, context_parallel_size=2), packed()),
    "PP2, dynamic": (layout(2, pp=2), DYNAMIC),
    "FSDP2 x 2, dynamic": (FSDP2_LAYOUTS["FSDP2 x 2"], DYNAMIC),
    "FSDP2 CP2, packed": (FSDP2_LAYOUTS["FSDP2 CP2"], packed()),
}


def taught(config: dict[str, Any], data: BatchedDataDict) -> BatchedDataDict:
    """The data with the teacher's top-k, read under `config`."""
    with open_policy(config, **UNUSED) as policy:
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
    made: dict[str, Any] = {}
    exec(python_blocks("docs/losses.md")[1], made)
    loss = made["TopKDistillation"]()
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
        assert_same_shards(expected, path, case.tp, seen["tp"], seen["weights"])


TEMPERATURE = 0.2
FILTERS = {"top_k": 180, "top_p": 0.85, "min_p": 0.01}
GENERATION = {"max_new_tokens": 1, "temperature": TEMPERATURE, **FILTERS}
ENTRIES = "some_entries"
KEPT: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one process, padded": (layout(1), {"logprob_chunk_size": 7}),
    "TP2+SP, padded": (layout(2, tp=2, sequence_parallel=True), {}),
    "TP2, packed": (layout(2, tp=2), packed() | {"logprob_chunk_size": 7}),
    "CP2, packed": (layout(2, context_parallel_size=2), packed()),
    "PP2, dynamic": (layout(2, pp=2), DYNAMIC),
    "FSDP2 TP2+SP x 2": (FSDP2_TENSOR_LAYOUTS["FSDP2 TP2+SP x 2"], {"logprob_chunk_size": 7}),
    "FSDP2 x 2, packed": (FSDP2_LAYOUTS["FSDP2 x 2"], packed() | {"logprob_chunk_size": 7}),
}


def total(
    data: BatchedDataDict,
    kept: torch.Tensor,
    whole: torch.Tensor,
    entropy: torch.Tensor,
    candidates: torch.Tensor,
) -> torch.Tensor:
    """A sum in which each of what a loss can ask for has a part, over the tokens that count."""
    each_BS = -kept - 0.3 * whole + 0.2 * entropy - 0.1 * candidates.sum(-1)
    return (each_BS * loss_mask(data)).sum()


class AsksForAll:
    """Takes what `total` adds up."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_entropy = True
    needs_unfiltered_logprobs = True
    candidates = ENTRIES

    def __call__(
        self,
        data,
        global_valid_seqs,
        global_valid_toks,
        next_token_logprobs,
        next_token_logprobs_unfiltered,
        next_token_entropy,
        candidate_logprobs,
    ) -> Any:
        given = next_token_logprobs, next_token_logprobs_unfiltered, next_token_entropy
        mask = loss_mask(data).bool()
        dropped = (next_token_logprobs == 0) & mask
        loss = total(data, *given, candidate_logprobs) / global_valid_toks
        return loss, {"dropped": dropped.sum().item(), "counted": mask.sum().item()}


def logits_of(model: PreTrainedModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    logits_BSV: torch.Tensor = model(tokens_BS).logits[:, :-1].float() / TEMPERATURE
    return logits_BSV


def kept_scores(
    model: PreTrainedModel, tokens_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities `[B, S - 1]` of what is kept, 0 of what is not, and entropies."""
    logits_BSV = logits_of(model, tokens_BS)
    kept_BSV = plain_kept(logits_BSV.flatten(0, 1), Filters(**FILTERS)).view(logits_BSV.shape)
    scores_BSV = logits_BSV.masked_fill(~kept_BSV, -1e30).log_softmax(-1)
    entropy_BS = -(scores_BSV.exp() * scores_BSV).sum(-1)
    found_BSV = scores_BSV.masked_fill(~kept_BSV, 0.0)
    return found_BSV.gather(-1, tokens_BS[:, 1:, None]).squeeze(-1), entropy_BS


def plain_loss(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    tokens_BS = data["input_ids"]
    kept_BS, entropy_BS = kept_scores(model, tokens_BS)
    whole_BSV = logits_of(model, tokens_BS).log_softmax(-1)
    whole_BS = whole_BSV.gather(-1, tokens_BS[:, 1:, None]).squeeze(-1)
    candidates_BSK = whole_BSV.gather(-1, data[ENTRIES][:, :-1])
    value = total(data, kept_BS, whole_BS, entropy_BS, candidates_BSK)
    return value / loss_mask(data).sum()


@pytest.fixture(scope="module")
def rows() -> BatchedDataDict:
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    random = torch.Generator().manual_seed(3)
    shape = (*data["input_ids"].shape, 4)
    return BatchedDataDict(dict(data) | {ENTRIES: torch.randint(0, VOCAB, shape, generator=random)})


@pytest.fixture(scope="module")
def expected_of_kept(rows, checkpoints) -> oracle.Learned:
    return oracle.Learned.of(checkpoints[True], rows, GLOBAL_BATCH, plain_loss)


def read_and_train(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    with open_policy(config) as policy:
        found = {
            "tp": policy.coords.tp,
            "logprobs": policy.logprobs(data),
            "entropy": policy.entropy(data),
            "reference": policy.reference_logprobs(data),
            "steps": [policy.train(s, AsksForAll(), mbs=2) for s in own_steps(policy, data)],
        }
        return found | {"weights": learned_weights(policy)}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_read_and_learned_as_from_whole_logits(
    ranks, checkpoints, rows, expected_of_kept, name: str
) -> None:
    case, batching = KEPT[name]
    path: Path = checkpoints[True]
    config = policy_config(path, case.megatron, generation=GENERATION, **batching)
    tokens_BS = rows["input_ids"]
    inside_BS = torch.arange(1, LENGTH) < rows["input_lengths"][:, None]
    read = {
        "logprobs": Exact.of(path, lambda m: kept_scores(m, tokens_BS)[0] * inside_BS),
        "entropy": Exact.of(path, lambda m: kept_scores(m, tokens_BS)[1] * inside_BS),
        "reference": Exact.of(
            path, lambda m: oracle.hf_logprobs(m, tokens_BS, TEMPERATURE) * inside_BS
        ),
    }
    results = ranks.run(case.world, read_and_train, config, rows)
    metrics = [seen["steps"][0]["microbatch_metrics"] for seen in results]
    dropped, counted = (sum(sum(own[name]) for own in metrics) for name in ("dropped", "counted"))
    assert 0 < dropped < counted
    for seen in results:
        for what, exact in read.items():
            assert_equal(what, seen[what][:, 1:], exact)
        assert (seen["logprobs"][:, 1:][inside_BS] == 0).any()
        expected_of_kept.assert_same_steps(seen["steps"])
        assert_same_shards(expected_of_kept, path, case.tp, seen["tp"], seen["weights"])


def test_filters_that_are_not_to_apply_to_logprobs_do_not(ranks, checkpoints, rows) -> None:
    read = []
    off = {"top_k": -1, "top_p": 1, "min_p": 0}
    for more in (off, {"filter_logprobs": False}, off | {"top_k": VOCAB}, {}):
        config = policy_config(checkpoints[True], {}, generation=GENERATION | more)
        read += ranks.run(1, answer, config, methodcaller("logprobs", rows))
    assert torch.equal(read[0], read[1])
    torch.testing.assert_close(read[2], read[0], rtol=0, atol=1e-5)
    assert (read[3] - read[0]).abs().max() > 0.1
